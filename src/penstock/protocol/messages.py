"""Protobuf classes of the Open Inference Protocol, of model configuration, and of gRPC's health check and reflection.

``make proto`` compiles ``proto/*.proto`` to the set of descriptors that lies beside this file. The classes are made from it at
run time, in a pool of descriptors of their own: no generated code that could refuse to load under another release of protobuf,
and no clash with the generated code of a client library in the same process, which registers the same names.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

Message = Any
"""An instance of one of the classes below. They are made at run time, so a type checker knows nothing of their fields."""

DESCRIPTORS = "descriptors.binpb"
"""Serialized ``FileDescriptorSet``, each file after those that it imports."""

POOL = DescriptorPool()


def _load() -> tuple[str, ...]:
    data = resources.files("penstock.protocol").joinpath(DESCRIPTORS).read_bytes()
    files = FileDescriptorSet.FromString(data).file
    for file in files:
        POOL.AddSerializedFile(file.SerializeToString())
    return tuple(file.name for file in files)


FILES = _load()
"""Names of all files in ``POOL``."""


def message(full_name: str) -> Any:
    """The class of a message by its full name, e.g. ``inference.ModelInferRequest``. Raises KeyError."""
    return GetMessageClass(POOL.FindMessageTypeByName(full_name))


ServerLiveRequest = message("inference.ServerLiveRequest")
ServerLiveResponse = message("inference.ServerLiveResponse")
ServerReadyRequest = message("inference.ServerReadyRequest")
ServerReadyResponse = message("inference.ServerReadyResponse")
ModelReadyRequest = message("inference.ModelReadyRequest")
ModelReadyResponse = message("inference.ModelReadyResponse")
ServerMetadataRequest = message("inference.ServerMetadataRequest")
ServerMetadataResponse = message("inference.ServerMetadataResponse")
ModelMetadataRequest = message("inference.ModelMetadataRequest")
ModelMetadataResponse = message("inference.ModelMetadataResponse")
InferParameter = message("inference.InferParameter")
InferTensorContents = message("inference.InferTensorContents")
ModelInferRequest = message("inference.ModelInferRequest")
ModelInferResponse = message("inference.ModelInferResponse")
ModelStreamInferResponse = message("inference.ModelStreamInferResponse")
ModelConfigRequest = message("inference.ModelConfigRequest")
ModelConfigResponse = message("inference.ModelConfigResponse")
ModelStatisticsRequest = message("inference.ModelStatisticsRequest")
StatisticDuration = message("inference.StatisticDuration")
InferStatistics = message("inference.InferStatistics")
InferResponseStatistics = message("inference.InferResponseStatistics")
InferBatchStatistics = message("inference.InferBatchStatistics")
MemoryUsage = message("inference.MemoryUsage")
ModelStatistics = message("inference.ModelStatistics")
ModelStatisticsResponse = message("inference.ModelStatisticsResponse")
ModelRepositoryParameter = message("inference.ModelRepositoryParameter")
RepositoryIndexRequest = message("inference.RepositoryIndexRequest")
RepositoryIndexResponse = message("inference.RepositoryIndexResponse")
RepositoryModelLoadRequest = message("inference.RepositoryModelLoadRequest")
RepositoryModelLoadResponse = message("inference.RepositoryModelLoadResponse")
RepositoryModelUnloadRequest = message("inference.RepositoryModelUnloadRequest")
RepositoryModelUnloadResponse = message("inference.RepositoryModelUnloadResponse")
SystemSharedMemoryStatusRequest = message("inference.SystemSharedMemoryStatusRequest")
SystemSharedMemoryStatusResponse = message("inference.SystemSharedMemoryStatusResponse")
SystemSharedMemoryRegisterRequest = message("inference.SystemSharedMemoryRegisterRequest")
SystemSharedMemoryRegisterResponse = message("inference.SystemSharedMemoryRegisterResponse")
SystemSharedMemoryUnregisterRequest = message("inference.SystemSharedMemoryUnregisterRequest")
SystemSharedMemoryUnregisterResponse = message("inference.SystemSharedMemoryUnregisterResponse")
CudaSharedMemoryStatusRequest = message("inference.CudaSharedMemoryStatusRequest")
CudaSharedMemoryStatusResponse = message("inference.CudaSharedMemoryStatusResponse")
CudaSharedMemoryRegisterRequest = message("inference.CudaSharedMemoryRegisterRequest")
CudaSharedMemoryRegisterResponse = message("inference.CudaSharedMemoryRegisterResponse")
CudaSharedMemoryUnregisterRequest = message("inference.CudaSharedMemoryUnregisterRequest")
CudaSharedMemoryUnregisterResponse = message("inference.CudaSharedMemoryUnregisterResponse")
TraceSettingRequest = message("inference.TraceSettingRequest")
TraceSettingResponse = message("inference.TraceSettingResponse")
LogSettingsRequest = message("inference.LogSettingsRequest")
LogSettingsResponse = message("inference.LogSettingsResponse")
ModelRateLimiter = message("inference.ModelRateLimiter")
ModelInstanceGroup = message("inference.ModelInstanceGroup")
ModelTensorReshape = message("inference.ModelTensorReshape")
ModelInput = message("inference.ModelInput")
ModelOutput = message("inference.ModelOutput")
BatchInput = message("inference.BatchInput")
BatchOutput = message("inference.BatchOutput")
ModelVersionPolicy = message("inference.ModelVersionPolicy")
ModelOptimizationPolicy = message("inference.ModelOptimizationPolicy")
ModelQueuePolicy = message("inference.ModelQueuePolicy")
ModelDynamicBatching = message("inference.ModelDynamicBatching")
ModelSequenceBatching = message("inference.ModelSequenceBatching")
ModelEnsembling = message("inference.ModelEnsembling")
ModelParameter = message("inference.ModelParameter")
ModelWarmup = message("inference.ModelWarmup")
ModelOperations = message("inference.ModelOperations")
ModelTransactionPolicy = message("inference.ModelTransactionPolicy")
ModelRepositoryAgents = message("inference.ModelRepositoryAgents")
ModelResponseCache = message("inference.ModelResponseCache")
ModelMetrics = message("inference.ModelMetrics")
ModelConfig = message("inference.ModelConfig")

HealthCheckRequest = message("grpc.health.v1.HealthCheckRequest")
HealthCheckResponse = message("grpc.health.v1.HealthCheckResponse")
