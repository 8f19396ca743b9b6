"""Protobuf classes of the Open Inference Protocol, of Triton's model configuration, and of gRPC's health check and reflection.

``make proto`` compiles ``proto/*.proto`` to the descriptor set next to this file. The classes are created from the descriptor set
at run time, in a separate descriptor pool. Generated code is not used, because it might not load with another release of protobuf.
Generated code would also conflict with a client library that registers the same names in the same process.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

Message = Any
"""An instance of one of the classes below. Type checkers do not know their fields, because the classes are created at run time."""

DESCRIPTORS = "descriptors.binpb"
"""A serialized ``FileDescriptorSet``, in which each file follows the files that it imports."""

POOL = DescriptorPool()


for _schema in FileDescriptorSet.FromString(
    resources.files("penstock.protocol").joinpath(DESCRIPTORS).read_bytes()
).file:
    POOL.AddSerializedFile(_schema.SerializeToString())


def message(full_name: str) -> Any:
    """The class of a message by its full name, e.g. ``inference.ModelInferRequest``. Raises KeyError."""
    return GetMessageClass(POOL.FindMessageTypeByName(full_name))


ServerLiveResponse = message("inference.ServerLiveResponse")
ServerReadyResponse = message("inference.ServerReadyResponse")
ModelReadyResponse = message("inference.ModelReadyResponse")
ServerMetadataResponse = message("inference.ServerMetadataResponse")
ModelMetadataResponse = message("inference.ModelMetadataResponse")
InferTensorContents = message("inference.InferTensorContents")
ModelInferRequest = message("inference.ModelInferRequest")
ModelInferResponse = message("inference.ModelInferResponse")
ModelStreamInferResponse = message("inference.ModelStreamInferResponse")
ModelConfigResponse = message("inference.ModelConfigResponse")
StatisticDuration = message("inference.StatisticDuration")
ModelStatistics = message("inference.ModelStatistics")
ModelStatisticsResponse = message("inference.ModelStatisticsResponse")
ModelRepositoryParameter = message("inference.ModelRepositoryParameter")
RepositoryIndexResponse = message("inference.RepositoryIndexResponse")
RepositoryModelLoadResponse = message("inference.RepositoryModelLoadResponse")
RepositoryModelUnloadResponse = message("inference.RepositoryModelUnloadResponse")
SystemSharedMemoryStatusResponse = message("inference.SystemSharedMemoryStatusResponse")
SystemSharedMemoryRegisterResponse = message("inference.SystemSharedMemoryRegisterResponse")
SystemSharedMemoryUnregisterResponse = message("inference.SystemSharedMemoryUnregisterResponse")
CudaSharedMemoryStatusResponse = message("inference.CudaSharedMemoryStatusResponse")
CudaSharedMemoryRegisterResponse = message("inference.CudaSharedMemoryRegisterResponse")
CudaSharedMemoryUnregisterResponse = message("inference.CudaSharedMemoryUnregisterResponse")
TraceSettingRequest = message("inference.TraceSettingRequest")
TraceSettingResponse = message("inference.TraceSettingResponse")
LogSettingsRequest = message("inference.LogSettingsRequest")
LogSettingsResponse = message("inference.LogSettingsResponse")
ModelInstanceGroup = message("inference.ModelInstanceGroup")
ModelInput = message("inference.ModelInput")
BatchInput = message("inference.BatchInput")
ModelVersionPolicy = message("inference.ModelVersionPolicy")
ModelSequenceBatching = message("inference.ModelSequenceBatching")
ModelConfig = message("inference.ModelConfig")

HealthCheckRequest = message("grpc.health.v1.HealthCheckRequest")
HealthCheckResponse = message("grpc.health.v1.HealthCheckResponse")
