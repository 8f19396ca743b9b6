"""Everything that HTTP answers, as data: its resources, and the handlers of all but inference."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from penstock.errors import InvalidArgument, NotFound, Unsupported
from penstock.online.repository.triton.model_config import to_json
from penstock.online.server.http.answer import JSON
from penstock.online.server.http.exchange import Exchange, infer, later
from penstock.online.server.http.generate import generate, generate_stream
from penstock.online.server.http.routes import Handler, Needs, Resource, Route
from penstock.online.server.metrics_page import CONTENT_TYPE
from penstock.online.server.shared_memory.registry import NO_CUDA

_Body = TypeVar("_Body")
_Content = Callable[[Exchange, Route], Awaitable[Any]]


class _Index(msgspec.Struct):
    ready: bool = False


class _Load(msgspec.Struct):
    parameters: dict[str, str | int | bool] = {}


class _SystemRegion(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


def _read(exchange: Exchange, kind: type[_Body]) -> _Body:
    """The body as ``kind``; an empty one is an empty object. Raises InvalidArgument."""
    try:
        return msgspec.json.decode(exchange.body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not what this resource takes: {error}") from None
    except RecursionError:
        raise InvalidArgument("the body's JSON is nested too deeply") from None


# Health and descriptions


def _live(exchange: Exchange, route: Route) -> None:
    exchange.reply_empty()


def _ready(exchange: Exchange, route: Route) -> None:
    exchange.reply_empty(200 if exchange.line.shared.dataplane.server_ready else 400)


def _model_ready(exchange: Exchange, route: Route) -> None:
    if exchange.line.shared.dataplane.model_ready(route.model, route.version):
        exchange.reply_empty()
    else:
        exchange.fail_with(400, "Model version not ready")


def _server_metadata(exchange: Exchange, route: Route) -> None:
    exchange.reply_json(exchange.line.shared.dataplane.server_metadata())


def _model_metadata(exchange: Exchange, route: Route) -> None:
    exchange.reply_json(exchange.line.shared.dataplane.model_metadata(route.model, route.version))


def _model_config(exchange: Exchange, route: Route) -> None:
    exchange.reply_json(to_json(exchange.line.shared.dataplane.model_config(route.model, route.version)))


def openapi(exchange: Exchange, route: Route) -> None:
    """All that is answered, in OpenAPI."""
    exchange.reply(200, JSON, exchange.line.shared.description())


# Statistics, settings and the repository


async def _statistics(exchange: Exchange, route: Route) -> dict[str, Any]:
    statistics = await exchange.line.shared.control.statistics(route.model, route.version)
    return {"model_stats": _of_client(exchange, statistics)}


async def _trace_settings(exchange: Exchange, route: Route) -> Mapping[str, Any]:
    return await exchange.line.shared.control.trace_settings(route.model)


async def _update_trace_settings(exchange: Exchange, route: Route) -> Mapping[str, Any]:
    return await exchange.line.shared.control.trace_settings(route.model, _read(exchange, dict[str, Any]))


async def _log_settings(exchange: Exchange, route: Route) -> Mapping[str, Any]:
    return await exchange.line.shared.control.log_settings()


async def _update_log_settings(exchange: Exchange, route: Route) -> Mapping[str, Any]:
    return await exchange.line.shared.control.log_settings(_read(exchange, dict[str, Any]))


async def _index(exchange: Exchange, route: Route) -> list[dict[str, Any]]:
    return _of_client(exchange, await exchange.line.shared.control.repository_index(_read(exchange, _Index).ready))


def _of_client(exchange: Exchange, models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of ``models`` that the client may use."""
    return [one for one in models if exchange.may_use(one["name"])]


async def _load(exchange: Exchange, route: Route) -> None:
    _refuse_repository(route)
    parameters = _read(exchange, _Load).parameters
    await exchange.line.shared.control.load(route.model, _decode_files(parameters))


async def _unload(exchange: Exchange, route: Route) -> None:
    _refuse_repository(route)
    await exchange.line.shared.control.unload(route.model, _read(exchange, _Load).parameters)


def _refuse_repository(route: Route) -> None:
    if route.name:
        raise Unsupported("'repository_name' specification is not supported")


def _decode_files(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """``file:…`` parameters are base64 in JSON."""
    return {name: _base64(name, value) if name.startswith("file:") else value for name, value in parameters.items()}


def _base64(name: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise InvalidArgument(f"'{name}' is not base64") from None


async def _write_metrics(exchange: Exchange) -> None:
    page = await exchange.line.shared.control.metrics_page()
    exchange.reply(200, b"Content-Type: %b\r\n" % CONTENT_TYPE.encode(), page)


def metrics(exchange: Exchange, route: Route) -> None:
    exchange.later(_write_metrics(exchange))


# Shared memory


async def _status(exchange: Exchange, route: Route) -> list[dict[str, Any]]:
    return await exchange.line.shared.control.shared_memory_status(route.name)


async def _register(exchange: Exchange, route: Route) -> None:
    region = _read(exchange, _SystemRegion)
    control = exchange.line.shared.control
    await control.register_shared_memory(route.name, region.key, region.offset, region.byte_size)


async def _unregister(exchange: Exchange, route: Route) -> None:
    await exchange.line.shared.control.unregister_shared_memory(route.name)


async def _cuda_status(exchange: Exchange, route: Route) -> list[dict[str, Any]]:
    if route.name:
        raise NotFound(f"Unable to find cuda shared memory region: '{route.name}'")
    return []


async def _register_cuda(exchange: Exchange, route: Route) -> None:
    raise Unsupported(NO_CUDA, "register system shared memory")


async def _unregister_cuda(exchange: Exchange, route: Route) -> None:
    """Clients forget all regions of either kind before they register their own."""


def _region_resources(kind: str, status: _Content, register: _Content, unregister: _Content) -> list[Resource]:
    status_of: Mapping[bytes, Handler] = {b"GET": later(status)}
    forget: Mapping[bytes, Handler] = {b"POST": later(unregister)}
    base = f"/v2/{kind}sharedmemory"
    return [
        Resource(f"{base}/status", status_of, needs=Needs.ADMIN),
        Resource(f"{base}/region/{{name}}/status", status_of, needs=Needs.ADMIN),
        Resource(f"{base}/region/{{name}}/register", {b"POST": later(register)}, needs=Needs.ADMIN),
        Resource(f"{base}/unregister", forget, needs=Needs.ADMIN),
        Resource(f"{base}/region/{{name}}/unregister", forget, needs=Needs.ADMIN),
    ]


_TRACE: Mapping[bytes, Handler] = {b"GET": later(_trace_settings), b"POST": later(_update_trace_settings)}
_LOGGING: Mapping[bytes, Handler] = {b"GET": later(_log_settings), b"POST": later(_update_log_settings)}

RESOURCES = [
    Resource("/v2", {b"GET": _server_metadata}),
    Resource("/v2/health/live", {b"GET": _live}, needs=Needs.NOTHING),
    Resource("/v2/health/ready", {b"GET": _ready}, needs=Needs.NOTHING),
    # In front of all models, none of which can be asked for under this name.
    Resource("/v2/models/stats", {b"GET": later(_statistics)}),
    Resource("/v2/models/{model}", {b"GET": _model_metadata}, versioned=True),
    Resource("/v2/models/{model}/ready", {b"GET": _model_ready}, versioned=True),
    Resource("/v2/models/{model}/config", {b"GET": _model_config}, versioned=True),
    Resource("/v2/models/{model}/stats", {b"GET": later(_statistics)}, versioned=True),
    Resource("/v2/models/{model}/infer", {b"POST": infer}, versioned=True),
    Resource("/v2/models/{model}/generate", {b"POST": generate}, versioned=True),
    Resource("/v2/models/{model}/generate_stream", {b"POST": generate_stream}, versioned=True),
    Resource("/v2/models/{model}/trace/setting", _TRACE, needs=Needs.ADMIN),
    Resource("/v2/trace/setting", _TRACE, needs=Needs.ADMIN),
    Resource("/v2/logging", _LOGGING, needs=Needs.ADMIN),
    Resource("/v2/repository/index", {b"POST": later(_index)}),
    Resource("/v2/repository/{name}/index", {b"POST": later(_index)}),
    Resource("/v2/repository/models/{model}/load", {b"POST": later(_load)}, needs=Needs.ADMIN),
    Resource("/v2/repository/models/{model}/unload", {b"POST": later(_unload)}, needs=Needs.ADMIN),
    Resource("/v2/repository/{name}/models/{model}/load", {b"POST": later(_load)}, needs=Needs.ADMIN),
    Resource("/v2/repository/{name}/models/{model}/unload", {b"POST": later(_unload)}, needs=Needs.ADMIN),
    *_region_resources("system", _status, _register, _unregister),
    *_region_resources("cuda", _cuda_status, _register_cuda, _unregister_cuda),
    Resource("/openapi.json", {b"GET": openapi}, needs=Needs.NOTHING),
]
"""The first that matches a URL has it."""

METRICS = [Resource("/metrics", {b"GET": metrics}, needs=Needs.NOTHING)]
"""What is on the port for metrics."""
