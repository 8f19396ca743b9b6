"""Who may use which endpoint, by keys and by headers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from calls import FakeCall, invoke
from http_servers import GatedServer, get, infer, post
from penstock.clock import ManualClock
from penstock.errors import Code, InvalidConfig, PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable
from penstock.online.server.access.admission import Admission
from penstock.online.server.access.auth import Access
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.access.table import RULES, AccessTable, Needs, read_restrictions
from penstock.online.server.config import ServerConfig
from penstock.online.server.grpc.call import GrpcMethod
from penstock.online.server.grpc.service import GrpcService
from penstock.online.server.grpc.stream import InferStream
from penstock.online.server.http.resources import make_resources, metrics_resources
from penstock.online.server.http.routes import Resource, Routes

EVERYONE = Access(None, ManualClock())
PREFIX = "/inference.GRPCInferenceService/"


def test_a_group_of_apis_has_one_header() -> None:
    found = read_restrictions(["health,trace:X-Key=a=b", "logging:k=v"])
    assert found == {"health": ("x-key", b"a=b"), "trace": ("x-key", b"a=b"), "logging": ("k", b"v")}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["health"], "lacks the API, header or value"),
        (["health:key"], "lacks the API, header or value"),
        (["health:=secret"], "lacks the API, header or value"),
        ([":key=secret"], "lacks the API, header or value"),
        (["helth:key=secret"], "unknown restricted API 'helth'.*did you mean 'health'"),
        (["health:a=secret", "trace,health:b=secret"], "'health' can not be specified in multiple config groups"),
    ],
)
def test_restrictions_that_are_wrong(texts: list[str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        read_restrictions(texts)
    assert "secret" not in str(caught.value)


def made_resources() -> list[Resource]:
    """All HTTP resources, with planes that are never called."""
    plane = cast(Any, SimpleNamespace(shared_memory=None, response_limit=ResponseLimit()))
    resources = make_resources(plane, plane, EVERYONE, ServerConfig())
    return [*resources, *metrics_resources(plane)]


def made_methods(table: AccessTable) -> dict[bytes, GrpcMethod]:
    plane = cast(Any, SimpleNamespace(shared_memory=None, response_limit=ResponseLimit()))
    return GrpcService(plane, plane, table, 8).methods


def test_every_endpoint_is_in_the_table_once_and_nothing_else_is() -> None:
    paths = [path for rule in RULES for path in rule.http]
    assert sorted(paths) == sorted({resource.path for resource in made_resources()})
    methods = [name for rule in RULES for name in rule.grpc]
    assert len(methods) == len(set(methods))
    assert set(methods) == {path.decode().rpartition("/")[2] for path in made_methods(AccessTable(EVERYONE))}


def test_an_endpoint_that_is_not_in_the_table_is_closed_whoever_asks() -> None:
    table = AccessTable(EVERYONE, rules=[rule for rule in RULES if rule.group not in ("metadata", "inference")])
    guard = table.of_path("/v2")
    assert guard is not None
    with pytest.raises(PermissionDenied, match="'/v2' is closed, since it has no access rule"):
        guard(None, {})
    resources = [Resource("/v3", {b"GET": lambda exchange, route: exchange.reply_empty()})]
    route = Routes(resources, table.of_path)[b"/v3"]
    assert route.guard is not None
    methods = made_methods(table)
    calls = [FakeCall(), FakeCall()]
    unary, stream = (methods[f"{PREFIX}{name}".encode()] for name in ("ModelInfer", "ModelStreamInfer"))
    invoke(unary, calls[0], b"")
    assert invoke(stream, calls[1]) is None
    assert [call.error.code for call in calls if call.error is not None] == [Code.PERMISSION_DENIED] * 2


def test_a_closed_url_is_answered_403() -> None:
    with GatedServer(rules=[rule for rule in RULES if rule.group != "metadata"]) as server:
        client = server.connect()
        refused = client.ask(get("/v2/models/m"))
        assert (refused.status, refused.error) == (403, "'/v2/models/{model}' is closed, since it has no access rule")
        assert client.ask(infer(1)).status == 200


def test_where_everyone_may_do_everything_nothing_is_guarded() -> None:
    table = AccessTable(EVERYONE)
    assert all(table.of_path(path) is None for rule in RULES for path in rule.http)
    assert all(table.of_method(name) is None for rule in RULES for name in rule.grpc)


def test_what_endpoints_need(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[clients.root]\nkey = "root-root-root-root"\nadmin = true\n'
        '[clients.bob]\nkey = "bob-bob-bob-bob-bob"\nmodels = ["m"]\n'
    )
    table = AccessTable(Access(keys, ManualClock()))
    bob, root = b"bob-bob-bob-bob-bob", b"root-root-root-root"
    assert table.of_path("/v2/health/live") is None
    model, admin = table.of_path("/v2/models/{model}/infer"), table.of_method("LogSettings")
    assert model is not None
    assert admin is not None
    assert model(bob, {}, "m") == model(bob, {}) == "bob"
    assert admin(root, {}) == "root"
    for guard, credential, error in ((model, None, Unauthenticated), (admin, bob, PermissionDenied)):
        with pytest.raises(error):
            guard(credential, {})
    with pytest.raises(PermissionDenied):
        model(bob, {}, "n")


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
        for _ in range(2):  # the second time, the head is known
            assert client.ask(get("/v2/models/stats", "x-key: v\r\n")).status == 200
            assert client.ask(index("X-KEY: v\r\n")).status == 200


def index(header: str) -> bytes:
    return post(b"{}", header, path="/v2/repository/index")


def test_over_grpc() -> None:
    table = AccessTable(EVERYONE, grpc=["health,inference:key=v"])
    methods = made_methods(table)
    live, stream = (methods[f"{PREFIX}{name}".encode()] for name in ("ServerLive", "ModelStreamInfer"))
    metadatas: list[dict[str, str | bytes]] = [{}, {"key": "v"}, {"triton-grpc-protocol-key": "w"}]
    for metadata in metadatas:
        calls = [FakeCall(metadata), FakeCall(metadata)]
        invoke(live, calls[0], b"")
        invoke(stream, calls[1])
        for call in calls:
            assert call.error is not None
            assert call.error.code is Code.UNAVAILABLE
            assert str(call.error) == "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
    key: dict[str, str | bytes] = {"triton-grpc-protocol-key": "v"}
    call = FakeCall(key)
    invoke(live, call, b"")
    assert (len(call.sent), call.error) == (1, None)
    assert isinstance(invoke(stream, FakeCall(key)), InferStream)
    assert table.of_method("ModelConfig") is None
    assert table.of_path("/v2/health/live") is None, "a restriction holds for one protocol"


def test_on_the_port_of_a_protocol_its_restrictions_hold_for_the_other_one_too() -> None:
    given = {"http": ["trace:h=v"], "grpc": ["logging:g=w"]}
    both = {"h": "v", "triton-grpc-protocol-g": "w"}
    for port, path, method in (("", None, None), ("http", None, "h"), ("grpc", "triton-grpc-protocol-g", None)):
        table = AccessTable(EVERYONE, **given, port=port)
        cases = [
            (table.of_path("/v2/trace/setting"), "h", PermissionDenied),
            (table.of_path("/v2/logging"), path, PermissionDenied),
            (table.of_method("TraceSetting"), method, Unavailable),
            (table.of_method("LogSettings"), "triton-grpc-protocol-g", Unavailable),
        ]
        for guard, header, kind in cases:
            if header is None:
                assert guard is None
                continue
            assert guard is not None
            guard(None, both)
            with pytest.raises(kind, match=f"is restricted, expecting header '{header}'"):
                guard(None, {name: value for name, value in both.items() if name != header})
        assert table.http_headers == {b"h", b"triton-grpc-protocol-g"}


def test_requests_count_where_they_are_admitted(tmp_path: Path) -> None:
    """Only inference takes a token, over both protocols, and before its message is read."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[clients.bob]\nkey = "bob-bob-bob-bob-bob"\nrequests_per_second = 0.001\nburst = 1\n')
    counted = {
        "ModelInfer",
        *(f"/v2/models/{{model}}/{what}" for what in ("infer", "run", "generate", "generate_stream")),
    }
    for rule in RULES:
        for name in (*rule.http, *rule.grpc):
            access = Access(keys, ManualClock())
            table = AccessTable(access, admission=Admission(access, ManualClock()))
            guard = table.of_path(name) if name.startswith("/") else table.of_method(name)
            if guard is None or rule.needs is Needs.ADMIN:
                continue
            assert guard(b"bob-bob-bob-bob-bob", {}) == "bob"
            is_dialect = name.startswith(("/predictions", "/explanations")) or (name.startswith("/v1/") and ":" in name)
            with pytest.raises(ResourceExhausted) if name in counted or is_dialect else nullcontext():
                guard(b"bob-bob-bob-bob-bob", {})
