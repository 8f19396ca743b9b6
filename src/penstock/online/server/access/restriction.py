"""Parts of the API that only those may use who send a header with the right value, as Triton has them.

Who answers is wrapped once, at the start, so that where nothing is restricted no request pays for it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig, Unavailable
from penstock.online.server.grpc.call import Call, Deaf, Method
from penstock.online.server.http.routes import Handler, Resource, Route

if TYPE_CHECKING:
    from penstock.online.server.http.exchange import Exchange

_APIS = {
    "health": (r"/v2/health/.*|/v2/models/\{model\}/ready", r"ServerLive|ServerReady|ModelReady|Check|Watch"),
    "metadata": (r"/v2|/v2/models/\{model\}", r"ServerMetadata|ModelMetadata"),
    "inference": (r"/v2/models/\{model\}/(infer|generate|generate_stream)", r"ModelInfer|ModelStreamInfer"),
    "shared-memory": (r"/v2/(system|cuda)sharedmemory/.*", r"(System|Cuda)SharedMemory.*"),
    "model-config": (r"/v2/models/\{model\}/config", r"ModelConfig"),
    "model-repository": (r"/v2/repository/.*", r"Repository.*"),
    "statistics": (r"/v2/models/(\{model\}/)?stats", r"ModelStatistics"),
    "trace": (r"/v2/(models/\{model\}/)?trace/setting", r"TraceSetting"),
    "logging": (r"/v2/logging", r"LogSettings"),
}
"""By name: patterns of its paths over HTTP, and of its methods over gRPC."""

Restrictions = Mapping[str, tuple[str, bytes]]
"""By API a header, in lower case, and its value."""


def read_restrictions(texts: Iterable[str], prefix: str = "") -> Restrictions:
    """``api,api:header=value`` each. Raises InvalidConfig, which does not repeat the value."""
    restrictions: dict[str, tuple[str, bytes]] = {}
    for text in texts:
        match = re.fullmatch(r"([^:]+):([^=]+)=(.+)", text)
        if match is None:
            raise InvalidConfig("a restriction names no API, header or value", "write api,api:header=value")
        for api in match[1].split(","):
            if api not in _APIS:
                raise InvalidConfig(f"unknown restricted API '{api:.40}'", did_you_mean(api, _APIS))
            if api in restrictions:
                raise InvalidConfig(f"restricted API '{api}' can not be specified in multiple config groups")
            restrictions[api] = (f"{prefix}{match[2]}".lower(), match[3].encode())
    return restrictions


def guard_resources(resources: Iterable[Resource], restrictions: Restrictions) -> list[Resource]:
    """``resources``, of which those of restricted APIs answer 403 to who does not send the header."""
    guarded = list(resources)
    for number, resource in enumerate(guarded):
        if key := _key(restrictions, 0, resource.path):
            handlers = {method: _guarded(handler, *key) for method, handler in resource.handlers.items()}
            guarded[number] = resource._replace(handlers=handlers)
    return guarded


def guard_methods(methods: Mapping[bytes, Method], texts: Iterable[str]) -> dict[bytes, Method]:
    """The same for gRPC, with UNAVAILABLE. ``texts``: as for ``read_restrictions``, which says what is raised."""
    restrictions = read_restrictions(texts, "triton-grpc-protocol-")
    guarded = dict(methods)
    for path, method in methods.items():
        if key := _key(restrictions, 1, path.decode().rpartition("/")[2]):
            guarded[path] = _guarded_method(method, *key)
    return guarded


def _key(restrictions: Restrictions, protocol: int, name: str) -> tuple[str, bytes] | None:
    return next((key for api, key in restrictions.items() if re.fullmatch(_APIS[api][protocol], name)), None)


def _guarded(handler: Handler, header: str, value: bytes) -> Handler:
    def handle(exchange: Exchange, route: Route) -> None:
        if secrets.compare_digest(exchange.head.keys.get(header.encode(), b""), value):
            handler(exchange, route)
        else:
            exchange.fail_with(403, f"This API is restricted, expecting header '{header}'")

    return handle


def _guarded_method(method: Method, header: str, value: bytes) -> Method:
    unary, stream = method.unary, method.stream

    def is_open(call: Call) -> bool:
        given = call.metadata.get(header, "")
        if secrets.compare_digest(given.encode() if isinstance(given, str) else given, value):
            return True
        call.finish(Unavailable(f"This protocol is restricted, expecting header '{header}'"))
        return False

    if stream is not None:
        return Method(method.path, stream=lambda call: stream(call) if is_open(call) else Deaf())
    assert unary is not None
    return Method(method.path, unary=lambda call, data: unary(call, data) if is_open(call) else None)
