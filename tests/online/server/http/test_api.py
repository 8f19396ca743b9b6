"""Every resource except inference, over HTTP and with Triton's client library."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from http_servers import Client, GatedServer, get, infer, post
from penstock.clock import ManualClock
from penstock.online.server.access.auth import Access
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.config import ServerConfig
from penstock.online.server.http.resources import make_resources
from penstock.testing import DOUBLER, FakeModel, double

NO_PLANE = cast(Any, SimpleNamespace(shared_memory=None, response_limit=ResponseLimit()))
"""Nothing is asked of it."""
RESOURCES = [
    resource
    for resource in make_resources(NO_PLANE, NO_PLANE, Access(None, ManualClock()), ServerConfig(dialects=()))
    if resource.path != "/"  # shared with dialects
]


@pytest.fixture(scope="module")
def server() -> Iterator[GatedServer]:
    with GatedServer() as server:
        yield server


@pytest.fixture
def client(server: GatedServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client
        assert client.ask(infer(21)).data == [42, 0]


@pytest.fixture
def library(server: GatedServer) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient("{}:{}".format(*server.address))
    yield client
    client.close()


def ask(client: Client, request: bytes, status: int = 200) -> Any:
    answer = client.ask(request)
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    return json.loads(answer.body) if answer.body else None


def fill(path: str) -> str:
    names = {"{model}": "m", "{version}": "1", "{name}": "n"}
    for placeholder, name in names.items():
        path = path.replace(placeholder, name)
    return path


@pytest.mark.parametrize("path", [path for resource in RESOURCES for path in resource.paths])
def test_other_methods_are_refused_and_the_right_ones_named(client: Client, path: str) -> None:
    allowed = {method.decode() for resource in RESOURCES for method in resource.handlers if path in resource.paths}
    allowed |= {"HEAD"} if "GET" in allowed else set()
    for method in {"GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"} - allowed:
        answer = client.ask(get(fill(path), method=method))
        assert (answer.status, answer.error) == (405, "Method Not Allowed")
        assert set(answer.headers["allow"].split(", ")) == allowed
    assert client.ask(get(fill(path) + "/")).status == 404


@pytest.mark.parametrize("path", [path for one in RESOURCES if b"GET" in one.handlers for path in one.paths])
def test_head_is_get_without_the_body(client: Client, path: str) -> None:
    found = client.ask(get(fill(path)))
    client.send(get(fill(path), method="HEAD"))
    head = client.read_head().decode()
    assert head.startswith(f"HTTP/1.1 {found.status} ")
    assert f"Content-Length: {len(found.body)}\r\n" in head or path.endswith("stats"), "which may grow"
    assert f"Content-Type: {found.headers['content-type']}\r\n" in head
    assert client.ask(get("/v2")).status == 200, "no body was sent that would be read as the next answer"


def test_health_has_the_bodies_that_kserve_reads(client: Client) -> None:
    assert ask(client, get("/v2/health/live")) == {"live": True}
    assert ask(client, get("/v2/health/ready")) == {"ready": True}
    assert ask(client, get("/v2/models/m/ready")) == {"name": "m", "ready": True}
    assert ask(client, get("/v2/models/m/versions/1/ready")) == {"name": "m", "ready": True}


def test_health_while_the_server_is_not_ready() -> None:
    with GatedServer() as server, Client(server.address) as client:
        server.call(server.dataplane.close)
        assert ask(client, get("/v2/health/ready"), 400) == {"ready": False}
        assert ask(client, get("/v2/health/live")) == {"live": True}


def test_descriptions_and_states_are_never_compressed() -> None:
    names = {"x" * 250 + str(number): FakeModel(DOUBLER, double) for number in range(30)}
    with GatedServer(also=names) as server, Client(server.address) as client:
        for ask_for in (post(b"", path="/v2/repository/index"), get("/v2/models/stats")):
            head, _, rest = ask_for.partition(b"\r\n")
            answer = client.ask(head + b"\r\nAccept-Encoding: gzip, deflate\r\n" + rest)
            assert "content-encoding" not in answer.headers
            assert len(answer.body) > 4096
            assert json.loads(answer.body)


def test_configuration(client: Client, library: triton.InferenceServerClient) -> None:
    config = ask(client, get("/v2/models/m/config"))
    assert (config["name"], config["max_batch_size"]) == ("m", 8)
    assert config["input"][0]["dims"] == [2]
    assert config["output"][0]["data_type"] == "TYPE_FP32"
    assert ask(client, get("/v2/models/m/versions/1/config")) == config
    assert library.get_model_config("m") == config
    assert "not found" in ask(client, get("/v2/models/n/config"), 404)["error"]


def test_statistics(client: Client, library: triton.InferenceServerClient) -> None:
    before = ask(client, get("/v2/models/m/stats"))["model_stats"][0]["inference_count"]
    assert client.ask(infer(1)).status == 200
    for path in ("/v2/models/m/stats", "/v2/models/m/versions/1/stats", "/v2/models/stats"):
        (stats,) = ask(client, get(path))["model_stats"]
        assert (stats["name"], stats["version"], stats["inference_count"]) == ("m", "1", before + 1)
    assert library.get_inference_statistics()["model_stats"][0]["inference_stats"]["success"]["count"] == before + 1
    assert "requested model 'n' is not available" in ask(client, get("/v2/models/n/stats"), 400)["error"]


def test_trace_settings(client: Client, library: triton.InferenceServerClient) -> None:
    before = ask(client, get("/v2/trace/setting"))
    assert isinstance(before["trace_rate"], str)
    assert ask(client, post(b'{"trace_rate":"500"}', path="/v2/trace/setting"))["trace_rate"] == "500"
    assert library.get_trace_settings()["trace_rate"] == "500"
    own = library.update_trace_settings("m", {"trace_rate": "7"})
    assert own["trace_rate"] == "7"
    assert ask(client, get("/v2/models/m/trace/setting")) == own
    assert library.update_trace_settings("m", {"trace_rate": None})["trace_rate"] == "500"
    assert client.ask(post(b'{"trace_rate":"x"}', path="/v2/trace/setting")).status == 400
    assert client.ask(post(b"[]", path="/v2/trace/setting")).status == 400
    assert client.ask(get("/v2/models/m/versions/1/trace/setting")).status == 404
    library.update_trace_settings(settings={"trace_rate": before["trace_rate"]})


def test_log_settings(client: Client, library: triton.InferenceServerClient) -> None:
    before = ask(client, get("/v2/logging"))
    assert ask(client, post(b'{"log_verbose_level":1}', path="/v2/logging"))["log_verbose_level"] == 1
    assert library.get_log_settings()["log_verbose_level"] == 1
    assert library.update_log_settings({"log_verbose_level": before["log_verbose_level"]}) == before
    assert client.ask(post(b'{"log_info":5}', path="/v2/logging")).status == 400


def test_the_index(client: Client, library: triton.InferenceServerClient) -> None:
    row = {"name": "m", "version": "1", "state": "READY", "reason": ""}
    assert library.get_model_repository_index() == [row]
    for path in ("/v2/repository/index", "/v2/repository/any/index"):
        assert ask(client, post(b"", path=path)) == [row]
        assert ask(client, post(b'{"ready":true}', path=path)) == [row]
    assert client.ask(post(b'{"ready":1}', path="/v2/repository/index")).status == 400


def test_loading_is_refused_without_a_repository(client: Client, library: triton.InferenceServerClient) -> None:
    for verb in ("load", "unload"):
        answer = client.ask(post(b"{}", path=f"/v2/repository/models/m/{verb}"))
        assert (answer.status, "explicit model load / unload is not allowed" in answer.error) == (503, True)
        assert client.ask(post(b"", path=f"/v2/repository/other/models/m/{verb}")).status == 501
    with pytest.raises(InferenceServerException, match="not allowed"):
        library.load_model("m", config="{}", files={"file:1/model.onnx": b"\0\xff"})
    answer = client.ask(post(b'{"parameters":{"file:1/a":"?"}}', path="/v2/repository/models/m/load"))
    assert answer.status == 503, "before the file is decoded"


def test_regions_that_are_wrong(client: Client) -> None:
    base = "/v2/systemsharedmemory"
    assert ask(client, get(f"{base}/status")) == []
    assert client.ask(get(f"{base}/region/r/status")).status == 404
    for body in (b"", b"{}", b"[]", b"{", b'{"key":5,"byte_size":1}', b'{"key":"/absent-key","byte_size":-1}'):
        assert client.ask(post(body, path=f"{base}/region/r/register")).status == 400
    assert ask(client, post(b"", path=f"{base}/region/r/unregister")) is None
    assert ask(client, post(b"", path=f"{base}/unregister")) is None


def test_regions_on_gpus_are_not_supported_and_none_is_there_to_forget(client: Client) -> None:
    base = "/v2/cudasharedmemory"
    assert ask(client, get(f"{base}/status")) == []
    assert client.ask(get(f"{base}/region/r/status")).status == 404
    refused = client.ask(post(b"{}", path=f"{base}/region/r/register"))
    assert (refused.status, "CUDA shared memory is not supported" in refused.error) == (501, True)
    assert ask(client, post(b"", path=f"{base}/region/r/unregister")) is None
    assert ask(client, post(b"", path=f"{base}/unregister")) is None
