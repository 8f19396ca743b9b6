"""The Open Inference Protocol over HTTP, all but inference: health, descriptions, and control over the server."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.errors import InvalidArgument, NotFound, Unsupported
from penstock.online.repository.triton.schema import to_json
from penstock.online.server.access.auth import Access
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http.exchange import Exchange, later
from penstock.online.server.http.routes import Handler, Resource, Route
from penstock.online.server.metrics_page import CONTENT_TYPE
from penstock.online.server.shared_memory.registry import NO_CUDA


class _Index(msgspec.Struct):
    ready: bool = False


class _Load(msgspec.Struct):
    parameters: dict[str, str | int | bool] = {}


class _SystemRegion(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


class Api:
    """Handlers over the two planes. The first line of a handler's docstring describes it in OpenAPI."""

    def __init__(self, dataplane: DataPlane, control: ControlPlane, access: Access) -> None:
        self._dataplane = dataplane
        self._control = control
        self._access = access

    def resources(self) -> list[Resource]:
        """The first that matches a URL has it."""
        trace: dict[bytes, Handler] = {b"GET": later(self.trace_settings), b"POST": later(self.update_trace_settings)}
        log: dict[bytes, Handler] = {b"GET": later(self.log_settings), b"POST": later(self.update_log_settings)}
        statistics: dict[bytes, Handler] = {b"GET": later(self.statistics)}
        index: dict[bytes, Handler] = {b"POST": later(self.index)}
        load: dict[bytes, Handler] = {b"POST": later(self.load)}
        unload: dict[bytes, Handler] = {b"POST": later(self.unload)}
        repositories = ("/v2/repository", "/v2/repository/{name}")
        return [
            Resource("/v2", {b"GET": self.server_metadata}, answer="ServerMetadata"),
            Resource("/v2/health/live", {b"GET": self.live}),
            Resource("/v2/health/ready", {b"GET": self.ready}),
            # Before all models, none of which can be asked for under this name.
            Resource("/v2/models/stats", statistics, answer="Statistics"),
            Resource("/v2/models/{model}", {b"GET": self.model_metadata}, versioned=True, answer="ModelMetadata"),
            Resource("/v2/models/{model}/ready", {b"GET": self.model_ready}, versioned=True),
            Resource("/v2/models/{model}/config", {b"GET": self.model_config}, versioned=True, answer="ModelConfig"),
            Resource("/v2/models/{model}/stats", statistics, versioned=True, answer="Statistics"),
            Resource("/v2/models/{model}/trace/setting", trace, answer="Settings", body="Settings"),
            Resource("/v2/trace/setting", trace, answer="Settings", body="Settings"),
            Resource("/v2/logging", log, answer="Settings", body="Settings"),
            *[Resource(f"{base}/index", index, answer="Index", body="IndexRequest") for base in repositories],
            *[Resource(f"{base}/models/{{model}}/load", load, body="LoadRequest") for base in repositories],
            *[Resource(f"{base}/models/{{model}}/unload", unload, body="LoadRequest") for base in repositories],
            *_regions("system", later(self.regions), later(self.register), later(self.unregister)),
            *_regions("cuda", later(self.cuda_regions), later(self.register_cuda), later(self.unregister_cuda)),
        ]

    # Health and descriptions

    def live(self, exchange: Exchange, route: Route) -> None:
        """200 while the process answers."""
        exchange.reply_empty()

    def ready(self, exchange: Exchange, route: Route) -> None:
        """200 when all models are loaded, else 400."""
        exchange.reply_empty(200 if self._dataplane.server_ready else 400)

    def model_ready(self, exchange: Exchange, route: Route) -> None:
        """Whether the model can be asked: 200 or 400."""
        if self._dataplane.model_ready(route.model, route.version):
            exchange.reply_empty()
        else:
            exchange.fail_with(400, "Model version not ready")

    def server_metadata(self, exchange: Exchange, route: Route) -> None:
        """Name, version and extensions."""
        exchange.reply_json(self._dataplane.server_metadata())

    def model_metadata(self, exchange: Exchange, route: Route) -> None:
        """What goes in and comes out."""
        exchange.reply_json(self._dataplane.model_metadata(route.model, route.version))

    def model_config(self, exchange: Exchange, route: Route) -> None:
        """The model's configuration."""
        exchange.reply_json(to_json(self._dataplane.model_config(route.model, route.version)))

    # Statistics, settings and the repository

    async def statistics(self, exchange: Exchange, route: Route) -> dict[str, Any]:
        """Counts and durations."""
        return {"model_stats": self._of_client(exchange, await self._control.statistics(route.model, route.version))}

    async def trace_settings(self, exchange: Exchange, route: Route) -> Mapping[str, Any]:
        """Trace settings in force."""
        return await self._control.trace_settings(route.model)

    async def update_trace_settings(self, exchange: Exchange, route: Route) -> Mapping[str, Any]:
        """Change trace settings."""
        return await self._control.trace_settings(route.model, exchange.read(dict[str, Any]))

    async def log_settings(self, exchange: Exchange, route: Route) -> Mapping[str, Any]:
        """Log settings in force."""
        return await self._control.log_settings()

    async def update_log_settings(self, exchange: Exchange, route: Route) -> Mapping[str, Any]:
        """Change log settings."""
        return await self._control.log_settings(exchange.read(dict[str, Any]))

    async def index(self, exchange: Exchange, route: Route) -> list[dict[str, Any]]:
        """All models."""
        return self._of_client(exchange, await self._control.repository_index(exchange.read(_Index).ready))

    async def load(self, exchange: Exchange, route: Route) -> None:
        """Load a model, or load it again."""
        _refuse_repository(route)
        parameters = exchange.read(_Load).parameters
        await self._control.load(route.model, _decode_files(parameters))

    async def unload(self, exchange: Exchange, route: Route) -> None:
        """Unload a model."""
        _refuse_repository(route)
        await self._control.unload(route.model, exchange.read(_Load).parameters)

    def _of_client(self, exchange: Exchange, models: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of ``models`` that the client may use."""
        return [one for one in models if self._access.may(exchange.client, one["name"])]

    # Shared memory

    async def regions(self, exchange: Exchange, route: Route) -> list[dict[str, Any]]:
        """The registered regions, or the one that is named."""
        return await self._control.shared_memory_status(route.name)

    async def register(self, exchange: Exchange, route: Route) -> None:
        """Register a region."""
        region = exchange.read(_SystemRegion)
        await self._control.register_shared_memory(route.name, region.key, region.offset, region.byte_size)

    async def unregister(self, exchange: Exchange, route: Route) -> None:
        """Forget a region, or all."""
        await self._control.unregister_shared_memory(route.name)

    async def cuda_regions(self, exchange: Exchange, route: Route) -> list[dict[str, Any]]:
        """No region: CUDA shared memory is not supported."""
        if route.name:
            raise NotFound(f"Unable to find cuda shared memory region: '{route.name}'")
        return []

    async def register_cuda(self, exchange: Exchange, route: Route) -> None:
        """Not supported."""
        raise Unsupported(NO_CUDA, "register system shared memory")

    async def unregister_cuda(self, exchange: Exchange, route: Route) -> None:
        """Does nothing: clients forget all regions of either kind before they register their own."""


def metrics_handler(control: ControlPlane) -> Handler:
    """Answers with the metrics page."""

    async def write(exchange: Exchange) -> None:
        exchange.reply(200, b"Content-Type: %b\r\n" % CONTENT_TYPE.encode(), await control.metrics_page())

    def metrics(exchange: Exchange, route: Route) -> None:
        """Metrics for Prometheus, of all models."""
        exchange.later(write(exchange))

    return metrics


def _regions(kind: str, status: Handler, register: Handler, unregister: Handler) -> list[Resource]:
    base = f"/v2/{kind}sharedmemory"
    region = f"{base}/region/{{name}}"
    return [
        Resource(f"{base}/status", {b"GET": status}, answer="Regions"),
        Resource(f"{region}/status", {b"GET": status}, answer="Regions"),
        Resource(f"{region}/register", {b"POST": register}, body="Region" if kind == "system" else "Anything"),
        Resource(f"{base}/unregister", {b"POST": unregister}),
        Resource(f"{region}/unregister", {b"POST": unregister}),
    ]


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
