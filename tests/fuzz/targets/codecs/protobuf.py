"""Fuzzes the decoder of ``ModelInferRequest``, against the protobuf class, and writes what it understood as an answer."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from penstock.online.server.answer_form import TEXT
from penstock.online.server.grpc.decoder import GrpcRequestDecoder, request_id
from penstock.online.server.grpc.encoder import GrpcAnswerEncoder
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.protocol import messages
from penstock.request import InferRequest, InferResponse
from penstock.tensor import DataType
from tests.fuzz.answers import Meaning, meaning
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import fields, relength
from tests.fuzz.target import Target

_CONTENTS = {
    DataType.BOOL: ("bool_contents", [True, False]),
    DataType.INT32: ("int_contents", [1, -2]),
    DataType.INT64: ("int64_contents", [1, -(2**63)]),
    DataType.UINT8: ("uint_contents", [1, 255]),
    DataType.UINT64: ("uint64_contents", [1, 2**64 - 1]),
    DataType.FP32: ("fp32_contents", [1.5, -2.5]),
    DataType.FP64: ("fp64_contents", [1.5, -2.5]),
    DataType.BYTES: ("bytes_contents", [b"a", b"bc"]),
}


def _seeds() -> list[Seed]:
    seeds = []
    for datatype in DataType:
        request = _request(datatype)
        raw = np.zeros(2, datatype.dtype).tobytes() if datatype.itemsize else b"\x01\0\0\0a\x02\0\0\0bc"
        request.raw_input_contents.append(raw)
        seeds.append(request)
        if datatype in _CONTENTS:
            request = _request(datatype)
            field, values = _CONTENTS[datatype]
            getattr(request.inputs[0].contents, field).extend(values)
            seeds.append(request)
    request = _request(DataType.FP32, id="some", model_version="1")
    request.inputs.add(name="b", datatype="UINT8", shape=[300])
    request.raw_input_contents.extend([bytes(8), bytes(300)])
    request.parameters["priority"].uint64_param = 1
    request.parameters["note"].string_param = "é"
    request.outputs.add(name="y").parameters["classification"].int64_param = 2
    seeds.append(request)
    request = _request(DataType.FP32)
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 8
    request.outputs.add(name="y").parameters["shared_memory_region"].string_param = "r"
    seeds.append(request)
    return [fields(request.SerializeToString()) for request in seeds]


def _request(datatype: DataType, **given: Any) -> Any:
    request = messages.ModelInferRequest(model_name="m", **given)
    request.inputs.add(name="x", datatype=datatype.value, shape=[1, 2])
    return request


class ProtobufTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"\x32\x00",
        b"\x1a\x02id",
        b"\x1a\x01\xff",
        b"\x0a\x01n",
        b"\x2a\x00",
        b"\x7a\x01x",
        b"\x78\x01",
        b"\x7d\x00\x00\x00\x00",
        b"\x79" + bytes(8),
        b"\x0b\x0c",
        b"\x32\xff\xff\xff\xff\x0f",
        b"\x32\x80\x80\x00",
        b"\xb2\x00\x00",
        b"FP32",
        b"BYTES",
        b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x32\x00" * 300,
    )

    def __init__(self) -> None:
        self.seeds = _seeds()
        self._memory = SharedMemory(enabled=True)
        self._decode = GrpcRequestDecoder(self._memory)
        self._encode = GrpcAnswerEncoder()
        self._valid = [b"".join(seed) for seed in self.seeds]
        self._meant = [self._understand(data)[0] for data in self._valid]
        self._turn = 0

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        return b"".join(relength(parts) if random.random() < 0.6 else parts)

    def run(self, data: bytes) -> None:
        meant, request = self._understand(data)
        again, _ = meaning(lambda: GrpcRequestDecoder(self._memory)(data), len(data))
        assert meant == again, f"remembered as {meant}, but it is {again}"
        self._compare(data, request)
        if request is not None:
            answer = InferResponse("m", "1", request.inputs, request.id)
            written = messages.ModelInferResponse.FromString(b"".join(self._encode(answer, TEXT)))
            assert [output.name for output in written.outputs] == list(request.inputs)
            assert written.id == request.id
        self._turn = (self._turn + 1) % len(self._valid)
        meant, _ = self._understand(self._valid[self._turn])
        assert meant == self._meant[self._turn], "what is valid is not understood any more"

    def _compare(self, data: bytes, request: InferRequest | None) -> None:
        """The protobuf class must agree; it may take more, since it knows nothing of tensors."""
        said = request_id(data)
        try:
            message = messages.ModelInferRequest.FromString(data)
        except DecodeError:
            assert request is None, "it is no message at all, but was taken"
            return
        if request is None:
            return
        assert (message.model_name, message.model_version) == (request.model_name, request.model_version)
        assert message.id == request.id == said or not said
        assert {tensor.name for tensor in message.inputs} == set(request.inputs)
        for tensor in message.inputs:
            assert tuple(tensor.shape) == request.inputs[tensor.name].shape
        numeric = [t.name for t in message.inputs if not (t.HasField("contents") or t.parameters)]
        for name, raw in zip(numeric, message.raw_input_contents, strict=False):
            if request.inputs[name].dtype != np.object_:
                assert np.ascontiguousarray(request.inputs[name]).tobytes() == raw

    def close(self) -> None:
        self._memory.close()

    def _understand(self, data: bytes) -> tuple[Meaning, InferRequest | None]:
        return meaning(lambda: self._decode(data), len(data))
