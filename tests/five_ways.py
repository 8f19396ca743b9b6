"""Five ways to ask one server and one process the same: HTTP in JSON and binary, gRPC raw and typed, shared memory, embedded.

Requests are written and answers read here, without the server's own codecs.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

import penstock
from http_servers import Client, post
from infer_requests import TYPED
from penstock.errors import PenstockError
from penstock.tensor import Array, DataType

Inputs = Mapping[str, Array]
REGION_BYTES = 1 << 16
NO_FORM = {DataType.FP16, DataType.BF16}
"""Types that neither JSON nor typed contents can carry."""


class Answered(NamedTuple):
    """Outputs, or the text of an error."""

    outputs: dict[str, Array]
    error: str = ""


class FiveWays:
    """Clients of the server at ``address``, which also serves gRPC, and of the models in ``folder``."""

    def __init__(self, address: tuple[str, int], folder: Path) -> None:
        self._address = address
        self._folder = folder
        self.all: dict[str, Callable[[str, Inputs], Answered]] = {
            "json": self.json,
            "binary": self.binary,
            "grpc raw": self.raw,
            "grpc typed": self.typed,
            "shared memory": self.shared,
            "embedded": self.embedded,
        }

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._http = stack.enter_context(Client(self._address))
            channel = stack.enter_context(grpc.insecure_channel("{}:{}".format(*self._address)))
            self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            self._region = Path("/dev/shm", f"penstock-five-{uuid.uuid4().hex}")
            self._region.write_bytes(bytes(2 * REGION_BYTES))
            self._region.chmod(0o600)
            stack.callback(self._region.unlink)
            about = {"key": self._region.name, "offset": 0, "byte_size": 2 * REGION_BYTES}
            path = "/v2/systemsharedmemory/region/five/register"
            assert self._http.ask(post(json.dumps(about).encode(), path=path)).status == 200
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def json(self, model: str, inputs: Inputs) -> Answered:
        tensors = [
            _described(name, array)
            | {"data": [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]}
            for name, array in inputs.items()
        ]
        return self._post(model, {"inputs": tensors})

    def binary(self, model: str, inputs: Inputs) -> Answered:
        raw = [wire(array) for array in inputs.values()]
        tensors = [
            _described(name, array) | {"parameters": {"binary_data_size": len(data)}}
            for (name, array), data in zip(inputs.items(), raw, strict=True)
        ]
        return self._post(model, {"inputs": tensors, "parameters": {"binary_data_output": True}}, *raw)

    def raw(self, model: str, inputs: Inputs) -> Answered:
        return self._grpc(raw_request(model, inputs))

    def typed(self, model: str, inputs: Inputs) -> Answered:
        request = service_pb2.ModelInferRequest(model_name=model)
        for name, array in inputs.items():
            tensor = request.inputs.add(**_described(name, array))
            datatype = DataType.from_numpy(array.dtype)
            tensor.contents.SetInParent()
            if datatype not in NO_FORM:
                getattr(tensor.contents, TYPED[datatype]).extend(array.ravel().tolist())
        return self._grpc(request)

    def shared(self, model: str, inputs: Inputs) -> Answered:
        """The inputs lie in the first half of the region of the client."""
        tensors, offset = [], 0
        with self._region.open("r+b") as file:
            for name, array in inputs.items():
                data = wire(array)
                assert offset + len(data) <= REGION_BYTES
                file.seek(offset)
                file.write(data)
                place = {
                    "shared_memory_region": "five",
                    "shared_memory_offset": offset,
                    "shared_memory_byte_size": len(data),
                }
                tensors.append(_described(name, array) | {"parameters": place})
                offset += len(data)
        return self._post(model, {"inputs": tensors, "parameters": {"binary_data_output": True}})

    def embedded(self, model: str, inputs: Inputs) -> Answered:
        opened = penstock.open(self._folder / f"{model}.onnx")
        try:
            return Answered(opened.infer(inputs))
        except PenstockError as error:
            return Answered({}, str(error))
        finally:
            opened.close()

    def _post(self, model: str, request: dict[str, Any], *raw: bytes) -> Answered:
        head = json.dumps(request).encode()
        headers = f"Inference-Header-Content-Length: {len(head)}\r\n" if raw else ""
        answer = self._http.ask(post(head + b"".join(raw), headers, f"/v2/models/{quote(model)}/infer"))
        if answer.status != 200:
            return Answered({}, answer.error)
        length = int(answer.headers.get("inference-header-content-length", len(answer.body)))
        found, offset = {}, length
        for output in json.loads(answer.body[:length])["outputs"]:
            if "data" in output:
                found[output["name"]] = _from_json(output)
            else:
                end = offset + output["parameters"]["binary_data_size"]
                found[output["name"]] = from_wire(answer.body[offset:end], output["datatype"], output["shape"])
                offset = end
        assert offset == len(answer.body) or length == len(answer.body)
        return Answered(found)

    def _grpc(self, request: Any) -> Answered:
        try:
            return read_response(self.stub.ModelInfer(request))
        except grpc.RpcError as error:
            return Answered({}, str(error.details()))


def raw_request(model: str, inputs: Inputs) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        request.inputs.add(**_described(name, array))
        request.raw_input_contents.append(wire(array))
    return request


def read_response(response: Any) -> Answered:
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return Answered({output.name: from_wire(data, output.datatype, output.shape) for output, data in pairs})


def wire(array: Array) -> bytes:
    """The elements as the protocol writes them."""
    if array.dtype == object:
        return b"".join(len(each).to_bytes(4, "little") + each for each in array.ravel())
    return array.tobytes()


def from_wire(data: bytes, datatype: str, shape: Any) -> Array:
    if datatype != "BYTES":
        return np.frombuffer(data, DataType(datatype).dtype).reshape(tuple(shape))
    texts, place = [], 0
    while place < len(data):
        end = place + 4 + int.from_bytes(data[place : place + 4], "little")
        texts.append(data[place + 4 : end])
        place = end
    return _texts(texts, shape)


def _from_json(output: dict[str, Any]) -> Array:
    if output["datatype"] == "BYTES":
        return _texts([each.encode() for each in output["data"]], output["shape"])
    return np.array(output["data"], DataType(output["datatype"]).dtype).reshape(output["shape"])


def _texts(texts: list[bytes], shape: Any) -> Array:
    array = np.empty(len(texts), object)
    array[:] = texts
    return array.reshape(tuple(shape))


def _described(name: str, array: Array) -> dict[str, Any]:
    return {"name": name, "datatype": DataType.from_numpy(array.dtype).value, "shape": list(array.shape)}
