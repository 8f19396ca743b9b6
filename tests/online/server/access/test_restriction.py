"""Parts of the API that ask for a header."""

from __future__ import annotations

from typing import Any

import pytest

from calls import FakeCall
from http_servers import GatedServer, get, infer, post
from penstock.errors import Code, InvalidConfig
from penstock.online.server.access.restriction import guard_methods, guard_resources, read_restrictions
from penstock.online.server.grpc.call import Method
from penstock.online.server.http.api import RESOURCES

APIS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
PREFIX = "/inference.GRPCInferenceService/"


def test_a_group_of_apis_has_one_header() -> None:
    found = read_restrictions(["health,trace:X-Key=a=b", "logging:k=v"])
    assert found == {"health": ("x-key", b"a=b"), "trace": ("x-key", b"a=b"), "logging": ("k", b"v")}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["health"], "names no API, header or value"),
        (["health:key"], "names no API, header or value"),
        (["health:=secret"], "names no API, header or value"),
        ([":key=secret"], "names no API, header or value"),
        (["helth:key=secret"], "unknown restricted API 'helth'.*did you mean 'health'"),
        (["health:a=secret", "trace,health:b=secret"], "'health' can not be specified in multiple config groups"),
    ],
)
def test_restrictions_that_are_wrong(texts: list[str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        read_restrictions(texts)
    assert "secret" not in str(caught.value)


def test_every_part_of_the_api_is_in_one_group_at_most_and_only_the_description_in_none() -> None:
    groups = {api: {r.path for r, g in zip(RESOURCES, guarded(api), strict=True) if g is not r} for api in APIS}
    assert all(groups.values())
    every = [path for paths in groups.values() for path in paths]
    assert len(every) == len(set(every))
    assert {resource.path for resource in RESOURCES} - set(every) == {"/openapi.json"}


def guarded(api: str) -> list[Any]:
    return guard_resources(RESOURCES, read_restrictions([f"{api}:k=v"]))


def test_over_http() -> None:
    with GatedServer(dialects=(), http_restricted_api=("statistics,model-repository:X-Key=v",)) as server:
        client = server.connect()
        assert client.ask(infer(1)).status == 200
        assert client.ask(get("/v2/models/m")).status == 200
        for ask in (lambda header: get("/v2/models/stats", header), index):
            for header in ("", "X-Key: w\r\n", "X-Key: vv\r\n"):
                refused = client.ask(ask(header))
                assert refused.status == 403
                assert refused.error == "This API is restricted, expecting header 'x-key'"
        for _ in range(2):  # the second time the head is one that was seen before
            assert client.ask(get("/v2/models/stats", "x-key: v\r\n")).status == 200
            assert client.ask(index("X-KEY: v\r\n")).status == 200


def index(header: str) -> bytes:
    return post(b"{}", header, path="/v2/repository/index")


def test_over_grpc() -> None:
    asked: list[str] = []
    receiver = object()

    def start(call: Any) -> Any:
        asked.append("stream")
        return receiver

    table = {
        f"{PREFIX}{name}".encode(): Method(f"{PREFIX}{name}".encode(), unary=lambda call, data: asked.append("unary"))
        for name in ("ServerLive", "ModelConfig")
    }
    path = f"{PREFIX}ModelStreamInfer".encode()
    table[path] = Method(path, stream=start)
    guards = guard_methods(table, ["health,inference:key=v"])
    live, stream = guards[f"{PREFIX}ServerLive".encode()].unary, guards[path].stream
    assert live is not None
    assert stream is not None
    metadatas: list[dict[str, str | bytes]] = [{}, {"key": "v"}, {"triton-grpc-protocol-key": "w"}]
    for metadata in metadatas:
        calls = [FakeCall(metadata), FakeCall(metadata)]
        live(calls[0], b"")
        closed = stream(calls[1])
        closed.message(b"")
        closed.half_close()
        for call in calls:
            assert call.error is not None
            assert call.error.code is Code.UNAVAILABLE
            assert str(call.error) == "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
    assert asked == []
    key: dict[str, str | bytes] = {"triton-grpc-protocol-key": "v"}
    live(FakeCall(key), b"")
    assert stream(FakeCall(key)) is receiver
    assert asked == ["unary", "stream"]
    assert guards[f"{PREFIX}ModelConfig".encode()] is table[f"{PREFIX}ModelConfig".encode()]


def test_nothing_is_wrapped_where_nothing_is_restricted() -> None:
    assert all(found is made for found, made in zip(guard_resources(RESOURCES, {}), RESOURCES, strict=True))
