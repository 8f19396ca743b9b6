"""A real server asked by Triton's asynchronous client, and as the clients of KServe, MLServer and OpenVINO and perf_analyzer ask."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import queue
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
import tritonclient.http.aio as over_http_aio
from tritonclient.utils import InferenceServerException

import models
import real
from penstock.tensor import DataType
from processes import ServerProcess

PYTHON = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(4)
        return config

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in tensors]
"""
WIDE = 'metric_tags { key: "a" value: "%s" }' % ("text " * 2000)
"""Makes the configuration longer than what may be compressed."""
ROWS = np.ones((5, 2), np.float32)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("repository")
    configs = {
        "free": WIDE,
        "four": "max_batch_size: 4",
        "outer": (
            'platform: "ensemble" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 2 } '
            'output { name: "y" data_type: TYPE_FP32 dims: 2 } ensemble_scheduling { step { model_name: "free" '
            'model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }'
        ),
        "python": 'backend: "python"',
        "away": "",
    }
    for name, config in configs.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        if name != "outer":
            file = (
                ("model.py", PYTHON.encode())
                if name == "python"
                else ("model.onnx", models.identity(DataType.FP32).data)
            )
            (root / name / "1" / file[0]).write_bytes(file[1])
    return root


@pytest.fixture(scope="module")
def url(repository: Path) -> Iterator[str]:
    loaded = [word for name in ("free", "four", "outer", "python") for word in ("--load-model", name)]
    flags = ("--model-repository", str(repository), "--model-control-mode", "explicit", "--allow-model-upload", *loaded)
    with ServerProcess(arguments=flags) as server:
        if not server.line:
            pytest.fail(server.end()[1])
        yield "{}:{}".format(*server.address)


@pytest.fixture
def grpc(url: str) -> Iterator[over_grpc.InferenceServerClient]:
    with over_grpc.InferenceServerClient(url) as client:
        yield client


def ask(url: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{url}{path}", data, {name.replace("_", "-"): value for name, value in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=real.PATIENCE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def x(kind: Any, rows: np.ndarray = ROWS, **how: bool) -> list[Any]:
    tensor = kind.InferInput("x", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows, **how)
    return [tensor]


def test_the_asynchronous_client_reads_every_description(url: str) -> None:
    async def main() -> None:
        async with over_http_aio.InferenceServerClient(url) as client:
            accepts = {"Accept-Encoding": "gzip, deflate"}
            assert len((await client.get_model_config("free", headers=accepts))["metric_tags"]["a"]) == 10_000
            assert (await client.get_model_metadata("free", headers=accepts))["name"] == "free"
            assert (await client.get_server_metadata(headers=accepts))["name"]
            assert (await client.get_inference_statistics(headers=accepts))["model_stats"]
            index = await client.get_model_repository_index(headers=accepts)
            assert {row["name"] for row in index} == {"away", "four", "free", "outer", "python"}
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("free")
            assert not await client.is_model_ready("away")
            many = np.zeros((1000, 2), np.float32)
            answer = await client.infer("free", x(over_http_aio, many), response_compression_algorithm="gzip")
            np.testing.assert_array_equal(answer.as_numpy("y"), many)

    asyncio.run(main())


def test_the_index_has_the_fields_of_mlserver_and_of_triton(url: str) -> None:
    _, body = ask(url, "/v2/repository/index", {"ready": True})
    rows = json.loads(body)
    assert {row["name"] for row in rows} == {"four", "free", "outer", "python"}
    for row in rows:
        assert (row["version"], row["state"], row["reason"]) == ("1", "READY", "")
    _, body = ask(url, "/v2/repository/index", {})
    assert [row for row in json.loads(body) if row["name"] == "away"] == [{"name": "away"}], "never loaded"


# More rows than ``max_batch_size``


def over_stream(client: over_grpc.InferenceServerClient, name: str) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put(error or result))
    client.async_stream_infer(name, x(over_grpc))
    answer = answers.get(timeout=real.PATIENCE_S)
    client.stop_stream()
    if isinstance(answer, Exception):
        raise answer


@pytest.mark.parametrize("name", ["four", "outer", "python", "free"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
def test_too_many_rows_over_grpc(grpc: over_grpc.InferenceServerClient, name: str, is_stream: bool) -> None:
    def send() -> None:
        over_stream(grpc, name) if is_stream else grpc.infer(name, x(over_grpc))

    if name == "free":
        send()
        return
    with pytest.raises(InferenceServerException, match=f"request batch-size must be <= 4 for '{name}'") as caught:
        send()
    assert caught.value.status() in ("StatusCode.INVALID_ARGUMENT", None)


TENSOR = {"name": "x", "shape": [5, 2], "datatype": "FP32", "data": ROWS.ravel().tolist()}
DIALECTS = {
    "/v2/models/{}/infer": {"inputs": [TENSOR]},
    "/v2/models/{}/versions/1/infer": {"inputs": [TENSOR]},
    "/v2/models/{}/generate": {"x": ROWS.tolist()},
    "/v2/models/{}/generate_stream": {"x": ROWS.tolist()},
    "/v1/models/{}:predict": {"instances": ROWS.tolist()},
    "/predictions/{}": ROWS.tolist(),
}


@pytest.mark.parametrize("path", DIALECTS)
def test_too_many_rows_over_http(url: str, path: str) -> None:
    for name in ("four", "outer", "python"):
        status, body = ask(url, path.format(name), DIALECTS[path])
        assert status == 400, body
        assert f"request batch-size must be <= 4 for '{name}'".encode() in body
    status, body = ask(url, path.format("free"), DIALECTS[path])
    assert status == 200, "a limit that the server chose bounds batches, not requests"


def test_too_many_rows_in_binary(url: str) -> None:
    with over_http.InferenceServerClient(url) as client:
        with pytest.raises(InferenceServerException, match="batch-size must be <= 4 for 'four'") as caught:
            client.infer("four", x(over_http, binary_data=True))
        assert caught.value.status() == "400"
        np.testing.assert_array_equal(client.infer("four", x(over_http, ROWS[:4])).as_numpy("y"), ROWS[:4])


# Overrides


@pytest.mark.parametrize("kind", [over_http, over_grpc], ids=["http", "grpc"])
def test_a_plain_load_undoes_an_override(url: str, kind: Any) -> None:
    files = {"file:1/model.onnx": models.linear().data}
    with kind.InferenceServerClient(url) as client:

        def most() -> int:
            config = client.get_model_config("away")
            return int(config["max_batch_size"] if isinstance(config, dict) else config.config.max_batch_size)

        client.load_model("away")
        usual = most()
        client.load_model("away", config='{"max_batch_size": 3}')
        assert most() == 3
        client.load_model("away")
        assert most() == usual
        client.load_model("away", config="{}", files=files)
        assert client.infer("away", x(kind, np.ones((1, 3), np.float32))).as_numpy("y").shape == (1, 2)
        client.load_model("away")
        np.testing.assert_array_equal(client.infer("away", x(kind)).as_numpy("y"), ROWS)
        client.unload_model("away")


# Headers and paths of clients in other languages


@pytest.mark.parametrize(
    "kind",
    [
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        "Application/JSON",
        "application/json ; charset=utf8",
        "text/plain; charset=utf-8",
        "application/octet-stream",
    ],
)
def test_the_content_type_of_json_does_not_matter(url: str, kind: str) -> None:
    accepts = {
        "Accept": "application/json, text/plain, */*",
        "Accept_Language": "de",
        "User_Agent": "Java-http-client/21",
    }
    infer = {"inputs": [TENSOR]}
    for path, body in {"/v2/models/free/infer": infer, "/v1/models/free:predict": {"instances": ROWS.tolist()}}.items():
        status, answer = ask(url, path, body, Content_Type=kind, **accepts)
        assert status == 200, answer
    assert ask(url, "/v2/repository/index", {}, Content_Type=kind, **accepts)[0] == 200


def test_an_absent_version_names_those_that_there_are(url: str, grpc: over_grpc.InferenceServerClient) -> None:
    for path in ("", "/config", "/infer"):
        status, body = ask(url, f"/v2/models/free/versions/7{path}", {"inputs": [TENSOR]} if path == "/infer" else None)
        assert status == 404
        text = json.loads(body)["error"]
        assert text.startswith("Request for unknown model: 'free' version 7 is not found")
        assert text.endswith("(its versions are 1)")
    with pytest.raises(InferenceServerException, match="its versions are 1"):
        grpc.get_model_metadata("free", "7")


# perf_analyzer


def test_what_perf_analyzer_asks_over_grpc(grpc: over_grpc.InferenceServerClient) -> None:
    assert grpc.is_server_live()
    before = grpc.get_trace_settings(as_json=True)["settings"]
    updated = grpc.update_trace_settings("free", {"trace_rate": "9"}, as_json=True)["settings"]
    assert (
        updated.keys() == before.keys() >= {"trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file"}
    )
    assert updated["trace_rate"] == {"value": ["9"]}
    grpc.update_trace_settings("free", {"trace_rate": None})
    for name in ("free", "python"):
        row = ROWS[:2]
        asked = over_grpc.service_pb2.ModelInferRequest(model_name=name, id="7")
        asked.inputs.add(name="x", datatype="FP32", shape=row.shape)
        asked.raw_input_contents.append(row.tobytes())
        asked.parameters["triton_enable_empty_final_response"].bool_param = True
        answer = grpc._client_stub.ModelInfer(asked)
        assert (answer.id, list(answer.raw_output_contents)) == ("7", [row.tobytes()])
        (found,) = grpc.get_inference_statistics(name).model_stats
        assert (found.name, found.version) == (name, "1")
        assert found.inference_count >= found.inference_stats.success.count >= 1
        for part in ("queue", "compute_input", "compute_infer", "compute_output"):
            assert getattr(found.inference_stats, part).count == found.inference_stats.success.count


# Clients that are not installed with the tests


def test_kserve_by_its_own_client(url: str) -> None:
    """What ``kserve.InferenceRESTClient`` reads of each answer."""
    for path, member in {"health/live": "live", "health/ready": "ready", "models/free/ready": "ready"}.items():
        status, body = ask(url, f"/v2/{path}")
        assert (status, json.loads(body)[member]) == (200, True)


@pytest.mark.real
def test_ovmsclient(url: str) -> None:
    ovms = pytest.importorskip("ovmsclient", reason="ovmsclient is not installed: pip install ovmsclient")
    client = ovms.make_http_client(url)
    assert client.get_model_status("free")[1]["state"] == "AVAILABLE"
    for version in (0, 1):
        metadata = client.get_model_metadata("free", version)
        assert (metadata["model_version"], metadata["inputs"]["x"]["dtype"]) == (1, "DT_FLOAT")
        np.testing.assert_array_equal(client.predict({"x": ROWS}, "free", version), ROWS)


KSERVE = """
import asyncio, sys
import kserve

async def main():
    client = kserve.InferenceRESTClient(kserve.inference_client.RESTConfig(protocol="v2"))
    base = f"http://{sys.argv[1]}"
    found = [await client.is_server_live(base), await client.is_server_ready(base)]
    found += [await client.is_model_ready(base, model) for model in ("free", "away")]
    tensor = kserve.InferInput("x", [3, 2], "FP32", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    answer = await client.infer(base, kserve.InferRequest("free", [tensor]), model_name="free")
    print(*found, answer.outputs[0].data)

asyncio.run(main())
"""


@pytest.mark.real
def test_kserve(url: str) -> None:
    if importlib.util.find_spec("kserve") is None:
        pytest.skip("kserve is not installed: pip install kserve")
    # In a process of its own, because its protobuf classes have the same names as Triton's.
    done = real.run(sys.executable, "-W", "ignore", "-c", KSERVE, url)
    assert done.stdout.split(b"\n")[-2] == b"True True True False [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]", done.stderr


@pytest.mark.real
@pytest.mark.parametrize("path", ["/v2/models/free", "/v2/health/live", "/v1/models/free"])
def test_curl(url: str, path: str) -> None:
    text = real.run("curl", "-sS", "--http2-prior-knowledge", "-w", "%{http_code}", f"http://{url}{path}").stdout
    assert text.endswith(b"415")
    assert b"curl --http1.1" in text
    for options in (["--http1.1"], ["--http2"], []):
        assert real.run("curl", "-sS", *options, "-w", "%{http_code}", f"http://{url}{path}").stdout.endswith(b"200")
    head: Callable[..., bytes] = lambda *more: real.run("curl", "-sS", "-I", *more, f"http://{url}{path}").stdout  # noqa: E731
    assert head().startswith(b"HTTP/1.1 200 OK")
