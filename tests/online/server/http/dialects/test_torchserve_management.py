"""TorchServe's management: what it asks of the model repository, and what it says of models."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dialect_models import ask, dialect_server, read, wait_for
from http_servers import Client, GatedServer, get, infer

JSON = "Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[GatedServer]:
    with dialect_server() as server:
        yield server


@pytest.fixture
def client(server: GatedServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client
        assert client.ask(infer(21)).data == [42, 0]


@pytest.fixture
def asked(server: GatedServer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked of a repository that does what it is told."""
    calls: list[tuple[Any, ...]] = []

    async def load(name: str, parameters: Mapping[str, Any]) -> None:
        calls.append(("load", name, dict(parameters)))
        if "config" in parameters:
            (group,) = json.loads(parameters["config"])["instance_group"]
            server.repository.find(name).config.instance_group[0].count = group["count"]

    async def unload(name: str, parameters: Mapping[str, Any]) -> None:
        calls.append(("unload", name, dict(parameters)))

    monkeypatch.setattr(server.shared.control, "load", load)
    monkeypatch.setattr(server.shared.control, "unload", unload)
    return calls


def test_models_are_listed_by_the_page(client: Client) -> None:
    names = [one["modelName"] for one in read(ask(client, "/models"))["models"]]
    assert len(names) == len(set(names)) > 5
    found, token = [], "0"
    while token:
        page = read(ask(client, f"/models?limit=4&next_page_token={token}"))
        assert len(page["models"]) <= 4
        found += [one["modelName"] for one in page["models"]]
        token = page.get("nextPageToken", "")
    assert found == names


def test_what_is_not_loaded_is_not_listed(server: GatedServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def index(ready: bool = False) -> list[dict[str, str]]:
        rows = [{"name": "served", "version": "1", "state": "READY"}, {"name": "unloaded"}]
        return rows[:1] if ready else rows

    monkeypatch.setattr(server.shared.control, "repository_index", index)
    assert [one["modelName"] for one in read(ask(client, "/models"))["models"]] == ["served"]


def test_descriptions(server: GatedServer, client: Client) -> None:
    server.gate.clear()
    try:
        with Client(server.address) as other:
            other.send(infer(1))
            wait_for(server, 1)
            (found,) = read(ask(client, "/models/m"))
            server.gate.set()
            assert other.read().status == 200
    finally:
        server.gate.set()
    assert found == {
        "modelName": "m",
        "modelVersion": "1",
        "modelUrl": "m",
        "engine": "fake",
        "runtime": "fake",
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 8,
        "maxBatchDelay": 0,
        "workers": [{"id": "0", "status": "READY", "gpu": False}],
        "jobQueueStatus": {"remainingCapacity": 4095, "pendingRequests": 1},
    }
    assert [one["modelVersion"] for one in read(ask(client, "/models/many"))] == ["2"]
    assert [one["modelVersion"] for one in read(ask(client, "/models/many/1"))] == ["1"]
    assert [one["modelVersion"] for one in read(ask(client, "/models/many/all"))] == ["1", "2"]
    assert read(ask(client, "/models/plain"))[0]["batchSize"] == 1
    assert read(ask(client, "/models/nobody"), 404)["type"] == "ModelNotFoundException"
    assert read(ask(client, "/models/many/5"), 404)["code"] == 404


def test_registering_is_loading(client: Client, asked: list[Any]) -> None:
    status = 'Model "m" Version: 1 registered with 1 initial workers'
    for url in ("m", "m.mar"):
        assert read(ask(client, f"/models?url={url}&model_name=m&batch_size=1", b""))["status"] == status
    assert read(ask(client, "/models", {"url": "m", "initial_workers": 1}, headers=JSON))["status"] == status
    assert asked == [("load", "m", {})] * 3


def test_scaling_is_loading_with_another_instance_group(client: Client, asked: list[Any]) -> None:
    found = read(ask(client, "/models/halves?min_worker=3&max_worker=4&synchronous=true", b"", "PUT"))
    assert found == {"status": "Workers scaled to 3 for model: halves"}
    assert [one["id"] for one in read(ask(client, "/models/halves"))[0]["workers"]] == ["0", "1", "2"]
    ((verb, name, parameters),) = asked
    assert (verb, name) == ("load", "halves")
    config = json.loads(parameters["config"])
    assert (config["name"], config["instance_group"][0]["count"], config["max_batch_size"]) == ("halves", 3, 8)
    found = read(ask(client, "/models/halves/1?min_worker=3", b"", "PUT"))
    assert found == {"status": "Workers scaled to 3 for model: halves, version: 1"}
    assert len(asked) == 1
    found = read(ask(client, "/models?url=halves&initial_workers=2", b""))
    assert found == {"status": 'Model "halves" Version: 1 registered with 2 initial workers'}
    assert [verb for verb, *_ in asked] == ["load", "load", "load"]


def test_unregistering_is_unloading(client: Client, asked: list[Any]) -> None:
    for path in ("/models/m", "/models/m/1"):
        assert read(ask(client, path, method="DELETE")) == {"status": 'Model "m" unregistered'}
    assert asked == [("unload", "m", {})] * 2


def test_what_the_repository_refuses_is_told(server: GatedServer, client: Client) -> None:
    for request in ("POST /models?url=m", "PUT /models/m?min_worker=2", "DELETE /models/m"):
        method, _, path = request.partition(" ")
        error = read(client.ask(get(path, method=method)), 503)
        assert error["type"] == "ServiceUnavailableException"
        assert "explicit model load / unload is not allowed" in error["message"]


@pytest.mark.parametrize(
    ("request_line", "status", "message"),
    [
        ("POST /models", 400, "not the name of a model"),
        ("POST /models?url=https://example.org/m.mar", 400, "nothing is fetched"),
        ("POST /models?url=..%2Fm", 400, "nothing is fetched"),
        ("POST /models?url=.mar", 400, "nothing is fetched"),
        ("POST /models?url=a%2Fb.mar", 400, "nothing is fetched"),
        ("POST /models?url=m&model_name=n", 501, "keeps its name"),
        ("POST /models?url=m&initial_workers=x", 400, "'initial_workers' must be a number"),
        ("PUT /models/m?min_worker=-1", 400, "'min_worker' must be a number from 0 to 1024"),
        ("PUT /models/m?min_worker=99999", 400, "must be a number from 0 to 1024"),
        ("PUT /models/m?min_worker=0", 501, "at least one worker"),
        ("PUT /models/m?min_worker=3&max_worker=2", 400, "max_worker cannot be less than min_worker"),
        ("PUT /models/nobody", 404, "not found"),
        ("PUT /models/many/1", 501, "has versions ['1', '2']"),
        ("DELETE /models/many/1", 501, "has versions ['1', '2']"),
        ("DELETE /models/nobody", 404, "not found"),
        ("PUT /models/m/1/set-default", 501, "version_policy"),
        ("GET /models?limit=0", 400, "'limit' must be a number from 1 to 1024"),
        ("GET /models?next_page_token=%F0%9F", 400, "'next_page_token' must be a number"),
        ("GET /models?" + "a=b&" * 65, 400, "parameters are wrong"),
        ("PATCH /models/m", 405, "Method Not Allowed"),
    ],
)
def test_what_is_refused(client: Client, asked: list[Any], request_line: str, status: int, message: str) -> None:
    method, _, path = request_line.partition(" ")
    error = read(client.ask(get(path, method=method)), status)
    assert error["code"] == status
    assert message in error["message"]
    assert asked == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    line=st.sampled_from(["GET /models", "POST /models", "GET /models/m", "PUT /models/plain"]),
    name=st.sampled_from(["url", "limit", "next_page_token", "min_worker", "initial_workers", "model_name"]),
    value=st.text(st.characters(codec="ascii", exclude_characters=" #\x7f", min_codepoint=33), max_size=12),
)
def test_nothing_in_a_url_is_a_fault_of_ours(server: GatedServer, line: str, name: str, value: str) -> None:
    method, _, path = line.partition(" ")
    with Client(server.address) as client:
        answer = client.ask(get(f"{path}?{name}={value}", method=method))
        assert answer.status in (200, 400, 404, 501, 503), answer.body
