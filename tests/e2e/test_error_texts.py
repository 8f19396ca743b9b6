"""Errors repeat little of a request, however large it is, and nothing that controls a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import grpc
import pytest

import models
from http_servers import Client
from penstock.protocol import messages
from processes import ServerProcess

_MOST = 1024
FILLS = {
    "plain": "x" * 1_000_000,
    "quotes": "\"'\\" * 100_000,
    "controls": "\x1b[2J\n\x00\u202e" * 50_000,
    "wide": "😀" * 100_000,
}

_TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3], "parameters": {"binary_data_size": 12}}
_PLACE = {"shared_memory_region": "r", "shared_memory_offset": 0, "shared_memory_byte_size": 12}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v2/models/linear/infer": [
        {"id": "i", "inputs": [_TENSOR], "outputs": [{"name": "y", "parameters": {"classification": 1}}]},
        {"inputs": [_TENSOR | {"parameters": _PLACE}], "outputs": [{"name": "y", "parameters": _PLACE}]},
        {"inputs": [_TENSOR | {"parameters": {}}], "parameters": {"priority": 1, "timeout": 1, "sequence_id": 1, "triton_x": "a"}},
        {"inputs": [_TENSOR | {"data": ["a", "b", "c"], "parameters": {}}]},
    ],
    "/v2/models/linear/generate": [{"id": 1, "x": [1, "b", 3], "other": "value", "parameters": {"a": "b"}}],
    "/v2/models/linear/generate_stream": [{"x": [1, "b", 3], "other": []}],
    "/v2/logging": [{"log_format": "default", "log_info": "x", "log_file": "f"}],
    "/v2/trace/setting": [{"trace_level": ["OFF"], "trace_rate": "1", "trace_mode": "triton", "log_frequency": "x"}],
    "/v2/repository/index": [{"ready": "x"}],
    "/v2/repository/models/linear/load": [{"parameters": {"config": '{"backend": "onnxruntime"}', "file:1/model.onnx": "aaaa"}}],
    "/v2/repository/models/linear/unload": [{"parameters": {"unload_dependents": "x"}}],
    "/v2/systemsharedmemory/region/r/register": [{"key": "/none", "byte_size": "8", "offset": 0}],
    "/v1/models/linear:predict": [{"signature_name": "a", "instances": [{"x": [1, 2, "c"]}]}, {"inputs": {"x": [["a", 2, 3]]}}],
    "/v1/models/linear:classify": [{"examples": [{"x": ["a", 2, 3]}], "context": {"y": "b"}}],
    "/predictions/linear": [{"x": [["a", 2, 3]]}, {"data": "a"}],
}  # fmt: skip
URLS = (
    "/{}",
    "/v2/{}",
    "/v2/models/{}",
    "/v2/models/{}/ready",
    "/v2/models/{}/config",
    "/v2/models/{}/stats",
    "/v2/models/{}/trace/setting",
    "/v2/models/linear/versions/{}",
    "/v2/models/linear/versions/{}/stats",
    "/v2/systemsharedmemory/region/{}/status",
    "/v2/cudasharedmemory/region/{}/status",
    "/v1/models/{}",
    "/v1/models/{}/metadata",
    "/v1/models/linear/versions/{}",
    "/v1/models/linear/labels/{}",
    "/v2?{}",
)
POSTS = (
    "/v2/models/{}/infer",
    "/v2/models/linear/versions/{}/infer",
    "/v2/models/{}/generate",
    "/v2/repository/models/{}/load",
    "/v2/repository/models/{}/unload",
    "/v2/repository/{}/index",
    "/v2/repository/{}/models/linear/load",
    "/v2/systemsharedmemory/region/{}/register",
    "/v2/systemsharedmemory/region/{}/unregister",
    "/v1/models/{}:predict",
    "/v1/models/linear/labels/{}:predict",
    "/v1/models/linear:{}",
    "/predictions/{}",
    "/predictions/linear/{}",
    "/explanations/{}",
)
HEADERS = (
    "Authorization: Bearer {}",
    "Content-Type: {}",
    "Content-Encoding: {}",
    "Accept-Encoding: {}",
    "Inference-Header-Content-Length: {}",
    "Origin: {}",
    "Sec-Fetch-Site: {}",
    "Transfer-Encoding: {}",
    "Upgrade: {}",
    "{}: x",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    (root / "linear/1").mkdir(parents=True)
    (root / "linear/1/model.onnx").write_bytes(models.linear().data)
    repository = ("--model-repository", str(root), "--model-control-mode", "explicit", "--load-model", "*")
    with ServerProcess(
        arguments=repository, allow_model_upload=True, max_header_bytes=8 << 20, log_file=root / "log"
    ) as server:
        yield server
    log = (root / "log").read_text()
    assert max(map(len, log.splitlines()), default=0) < 10_000
    assert log.replace("\n", "").isprintable()


def mutants(value: Any, fill: str) -> Iterator[Any]:
    """Copies of ``value`` with one text, name of a member, or number replaced by ``fill``."""
    match value:
        case dict():
            for name, each in value.items():
                yield {fill if key == name else key: other for key, other in value.items()}
                yield from (value | {name: mutant} for mutant in mutants(each, fill))
        case list():
            for place, each in enumerate(value):
                yield from ([*value[:place], mutant, *value[place + 1 :]] for mutant in mutants(each, fill))
        case _:
            yield fill


def check(status: int, body: bytes) -> None:
    assert status < 600
    if status >= 400 and body:
        assert len(body) < _MOST, (status, len(body), body[:200])
        assert all(each.isprintable() for text in json.loads(body).values() for each in str(text).split("\n"))


def request(method: str, path: str, body: bytes = b"", header: str = "Accept: */*") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("path", BODIES)
def test_errors_about_json(server: ServerProcess, path: str, fill: str) -> None:
    for base in BODIES[path]:
        for mutant in mutants(base, FILLS[fill]):
            with Client(server.address) as client:
                answer = client.ask(request("POST", path, json.dumps(mutant).encode()))
                check(answer.status, answer.body)


@pytest.mark.parametrize("fill", [*FILLS, "digits"])
def test_errors_about_urls(server: ServerProcess, fill: str) -> None:
    text = quote({"digits": "9" * 1_000_000, **FILLS}[fill][:100_000])
    for method, paths in (("GET", URLS), ("POST", POSTS), ("DELETE", URLS)):
        for path in paths:
            with Client(server.address) as client:
                answer = client.ask(request(method, path.format(text), b"{}" if method == "POST" else b""))
                check(answer.status, answer.body)


@pytest.mark.parametrize("fill", ["x" * 1_000_000, "\xff" * 1_000_000, "9" * 1_000_000])
@pytest.mark.parametrize("header", HEADERS)
def test_errors_about_headers(server: ServerProcess, header: str, fill: str) -> None:
    with Client(server.address) as client:
        client.send(request("POST", "/v2/models/linear/infer", b"{}", header.format(fill)))
        answer = client.read_final()
        assert answer.status >= 400
        check(answer.status, answer.body)


@pytest.mark.parametrize("fill", FILLS)
def test_reasons_in_the_index(server: ServerProcess, fill: str) -> None:
    with Client(server.address) as client:
        config = json.dumps({"backend": FILLS[fill]})
        body = json.dumps({"parameters": {"config": config, "file:1/model.onnx": "aaaa"}}).encode()
        assert client.ask(request("POST", "/v2/repository/models/linear/load", body)).status >= 400
        index = json.loads(client.ask(request("POST", "/v2/repository/index", b"{}")).body)
    assert all(len(str(row.get("reason"))) < _MOST for row in index)
    assert any(row.get("reason") for row in index)


def _of(name: str) -> Any:
    return messages.message(f"inference.{name}")


def _place(**more: Any) -> dict[str, Any]:
    parameter = _of("InferParameter")
    return {
        "shared_memory_region": parameter(string_param="r"),
        "shared_memory_byte_size": parameter(int64_param=12),
        **more,
    }


def _calls() -> dict[str, Any]:
    tensor, output = _of("ModelInferRequest").InferInputTensor, _of("ModelInferRequest").InferRequestedOutputTensor
    x = tensor(name="x", datatype="FP32", shape=[1, 3])
    x.contents.fp32_contents.extend([1, 2, 3])
    text = tensor(name="x", datatype="BYTES", shape=[1, 3])
    text.contents.bytes_contents.append(b"a")
    shared = tensor(name="x", datatype="FP32", shape=[1, 3], parameters=_place())
    parameters = {"a": _of("InferParameter")(string_param="b"), "priority": _of("InferParameter")(string_param="x")}
    config = _of("ModelRepositoryParameter")(string_param='{"backend": "onnxruntime"}')
    level = _of("TraceSettingRequest").SettingValue(value=["OFF"])
    logged = _of("LogSettingsRequest").SettingValue(string_param="default")
    return {
        "ModelInfer": [
            _of("ModelInferRequest")(
                model_name="linear",
                model_version="1",
                id="i",
                inputs=[x],
                outputs=[output(name="y")],
                parameters=parameters,
            ),
            _of("ModelInferRequest")(model_name="linear", inputs=[text]),
            _of("ModelInferRequest")(
                model_name="linear", inputs=[shared], outputs=[output(name="y", parameters=_place())]
            ),
        ],
        "ModelReady": [_of("ModelReadyRequest")(name="linear", version="1")],
        "ModelMetadata": [_of("ModelMetadataRequest")(name="linear", version="1")],
        "ModelConfig": [_of("ModelConfigRequest")(name="linear", version="1")],
        "ModelStatistics": [_of("ModelStatisticsRequest")(name="linear", version="1")],
        "RepositoryIndex": [_of("RepositoryIndexRequest")(repository_name="r")],
        "RepositoryModelLoad": [
            _of("RepositoryModelLoadRequest")(repository_name="r", model_name="linear", parameters={"config": config})
        ],
        "RepositoryModelUnload": [_of("RepositoryModelUnloadRequest")(model_name="linear", parameters={"a": config})],
        "SystemSharedMemoryStatus": [_of("SystemSharedMemoryStatusRequest")(name="r")],
        "SystemSharedMemoryRegister": [_of("SystemSharedMemoryRegisterRequest")(name="r", key="/none", byte_size=8)],
        "CudaSharedMemoryStatus": [_of("CudaSharedMemoryStatusRequest")(name="r")],
        "TraceSetting": [_of("TraceSettingRequest")(settings={"trace_level": level}, model_name="linear")],
        "LogSettings": [_of("LogSettingsRequest")(settings={"log_format": logged})],
    }


CALLS = _calls()


def mutant_messages(message: Any, fill: str) -> Iterator[Any]:
    """Copies of ``message`` with one string, bytes or key of a map replaced by ``fill``."""
    for field, value in message.ListFields():
        if field.message_type and field.message_type.GetOptions().map_entry:
            for key in value:
                copy = type(message)()
                copy.CopyFrom(message)
                getattr(copy, field.name)[fill].CopyFrom(value[key])
                del getattr(copy, field.name)[key]
                yield copy
                for mutant in mutant_messages(value[key], fill):
                    copy = type(message)()
                    copy.CopyFrom(message)
                    getattr(copy, field.name)[key].CopyFrom(mutant)
                    yield copy
        elif field.message_type or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            repeated = hasattr(value, "append")
            for place, each in enumerate(value if repeated else [value]):
                raw = fill if field.type == field.TYPE_STRING else fill.encode()
                for mutant in mutant_messages(each, fill) if field.message_type else [raw]:
                    copy = type(message)()
                    copy.CopyFrom(message)
                    if not field.message_type:
                        if repeated:
                            getattr(copy, field.name)[place] = mutant
                        else:
                            setattr(copy, field.name, mutant)
                    elif repeated:
                        getattr(copy, field.name)[place].CopyFrom(mutant)
                    else:
                        getattr(copy, field.name).CopyFrom(mutant)
                    yield copy


@pytest.mark.parametrize("fill", FILLS)
def test_errors_about_grpc_messages(server: ServerProcess, fill: str) -> None:
    port = next(word for word in server.line.split() if word.startswith("grpc=")).removeprefix("grpc=")
    texts: list[str] = []
    with grpc.insecure_channel(port) as channel:
        for name, bases in CALLS.items():
            ask = channel.unary_unary(f"/inference.GRPCInferenceService/{name}")
            for message in (mutant for base in bases for mutant in mutant_messages(base, FILLS[fill])):
                try:
                    ask(message.SerializeToString(), timeout=20)
                except grpc.RpcError as error:
                    texts.append(str(error.details()))
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        for message in (mutant for base in CALLS["ModelInfer"] for mutant in mutant_messages(base, FILLS[fill])):
            (answer,) = stream(iter([message.SerializeToString()]), timeout=20)
            texts.append(_of("ModelStreamInferResponse").FromString(answer).error_message)
    assert len(texts) > 20
    assert max(len(text.encode()) for text in texts) < _MOST
    assert all(text.replace("\n", "").isprintable() for text in texts)
