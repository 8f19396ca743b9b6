"""The Open Inference Protocol over HTTP, except inference: health, metadata, and control of the server."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from penstock.errors import InvalidArgument, NotFound, Unsupported, quoted
from penstock.online.repository.override import is_file
from penstock.online.repository.triton.schema import to_json
from penstock.online.server.access.auth import Access
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http.exchange import Exchange, later
from penstock.online.server.http.routes import Handler, Resource, Route
from penstock.online.server.shared_memory.registry import NO_CUDA
from penstock.online.server.to_thread import run
from penstock.telemetry.exposition import CONTENT_TYPE

_PIECE = 256 << 10
"""Characters to decode at a time. A multiple of 4, because base64 encodes 3 bytes in 4 characters."""


class _Index(msgspec.Struct):
    ready: bool = False


class _Load(msgspec.Struct):
    parameters: dict[str, str | int | bool] = {}


class _SystemRegion(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


class Api:
    """Handlers that use the data plane and the control plane. The first line of a handler's docstring is its OpenAPI summary."""

    def __init__(self, dataplane: DataPlane, control: ControlPlane, access: Access) -> None:
        self._dataplane = dataplane
        self._control = control
        self._access = access

    def resources(self) -> list[Resource]:
        """The resources, in order of precedence."""
        trace = {b"GET": self.trace_settings, b"POST": self.update_trace_settings}
        log = {b"GET": self.log_settings, b"POST": self.update_log_settings}
        statistics = {b"GET": self.statistics}
        repositories = ("/v2/repository", "/v2/repository/{name}")
        return [
            Resource("/v2", {b"GET": self.server_metadata}, answer="ServerMetadata"),
            Resource("/v2/health/live", {b"GET": self.live}, answer="Live"),
            Resource("/v2/health/ready", {b"GET": self.ready}, answer="Ready"),
            # Takes precedence over a model named "stats".
            Resource("/v2/models/stats", statistics, answer="Statistics"),
            Resource("/v2/models/{model}", {b"GET": self.model_metadata}, versioned=True, answer="ModelMetadata"),
            Resource("/v2/models/{model}/ready", {b"GET": self.model_ready}, versioned=True, answer="ModelReady"),
            Resource("/v2/models/{model}/config", {b"GET": self.model_config}, versioned=True, answer="ModelConfig"),
            Resource("/v2/models/{model}/stats", statistics, versioned=True, answer="Statistics"),
            Resource("/v2/models/{model}/trace/setting", trace, answer="Settings", body="Settings"),
            Resource("/v2/trace/setting", trace, answer="Settings", body="Settings"),
            Resource("/v2/logging", log, answer="Settings", body="Settings"),
            *[
                Resource(f"{base}/index", {b"POST": self.index}, answer="Index", body="IndexRequest")
                for base in repositories
            ],
            *[
                Resource(f"{base}/models/{{model}}/load", {b"POST": self.load}, body="LoadRequest")
                for base in repositories
            ],
            *[
                Resource(f"{base}/models/{{model}}/unload", {b"POST": self.unload}, body="LoadRequest")
                for base in repositories
            ],
            *_regions("system", self.regions, self.register, self.unregister),
            *_regions("cuda", self.cuda_regions, self.register_cuda, self.unregister_cuda),
        ]

    # Health and descriptions

    def live(self, exchange: Exchange, route: Route) -> None:
        """200 while the process responds."""
        exchange.reply_json({"live": True})

    def ready(self, exchange: Exchange, route: Route) -> None:
        """200 when all models are loaded, else 400."""
        is_ready = self._dataplane.server_ready
        exchange.reply_json({"ready": is_ready}, 200 if is_ready else 400)

    def model_ready(self, exchange: Exchange, route: Route) -> None:
        """200 when the model is ready, else 400."""
        if self._dataplane.model_ready(route.model, route.version):
            exchange.reply_json({"name": route.model, "ready": True})
        else:
            exchange.fail_with(400, "Model version not ready")

    def server_metadata(self, exchange: Exchange, route: Route) -> None:
        """Name, version and extensions of the server."""
        exchange.reply_json(self._dataplane.server_metadata())

    def model_metadata(self, exchange: Exchange, route: Route) -> None:
        """Versions, inputs and outputs of a model."""
        exchange.reply_json(self._dataplane.model_metadata(route.model, route.version))

    def model_config(self, exchange: Exchange, route: Route) -> None:
        """Configuration of a model."""
        exchange.reply_json(to_json(self._dataplane.model_config(route.model, route.version)))

    # Statistics, settings and the repository

    @later
    async def statistics(self, exchange: Exchange, route: Route) -> dict[str, Any]:
        """Request counts and durations."""
        return {"model_stats": self._of_client(exchange, await self._control.statistics(route.model, route.version))}

    @later
    async def trace_settings(self, exchange: Exchange, route: Route) -> Mapping[str, Any]:
        """Current trace settings."""
        return await self._control.trace_settings(route.model)

    @later
    async def update_trace_settings(self, exchange: Exchange, route: Route) -> Mapping[str, Any]:
        """Change trace settings."""
        return await self._control.trace_settings(route.model, await exchange.read(dict[str, Any]))

    @later
    async def log_settings(self, exchange: Exchange, route: Route) -> Mapping[str, Any]:
        """Current log settings."""
        return await self._control.log_settings()

    @later
    async def update_log_settings(self, exchange: Exchange, route: Route) -> Mapping[str, Any]:
        """Change log settings."""
        return await self._control.log_settings(await exchange.read(dict[str, Any]))

    @later
    async def index(self, exchange: Exchange, route: Route) -> list[dict[str, Any]]:
        """All models."""
        return self._of_client(exchange, await self._control.repository_index((await exchange.read(_Index)).ready))

    @later
    async def load(self, exchange: Exchange, route: Route) -> None:
        """Load or reload a model."""
        _refuse_repository(route)
        parameters = (await exchange.read(_Load)).parameters
        self._control.check_load(route.model, parameters)
        await self._control.load(route.model, await run(partial(_decode_files, parameters)))

    @later
    async def unload(self, exchange: Exchange, route: Route) -> None:
        """Unload a model."""
        _refuse_repository(route)
        await self._control.unload(route.model, (await exchange.read(_Load)).parameters)

    def _of_client(self, exchange: Exchange, models: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The ``models`` that the client may use."""
        return [one for one in models if self._access.may(exchange.client, one["name"])]

    # Shared memory

    @later
    async def regions(self, exchange: Exchange, route: Route) -> list[dict[str, Any]]:
        """One registered region, or all regions."""
        return await self._control.shared_memory_status(route.name)

    @later
    async def register(self, exchange: Exchange, route: Route) -> None:
        """Register a region."""
        region = await exchange.read(_SystemRegion)
        await self._control.register_shared_memory(route.name, region.key, region.offset, region.byte_size)

    @later
    async def unregister(self, exchange: Exchange, route: Route) -> None:
        """Unregister a region, or all regions."""
        await self._control.unregister_shared_memory(route.name)

    def cuda_regions(self, exchange: Exchange, route: Route) -> None:
        """An empty list: CUDA shared memory is not supported."""
        if route.name:
            raise NotFound(f"Unable to find cuda shared memory region: {quoted(route.name)}")
        exchange.reply_json([])

    def register_cuda(self, exchange: Exchange, route: Route) -> None:
        """Not supported."""
        raise Unsupported(NO_CUDA, "register system shared memory")

    def unregister_cuda(self, exchange: Exchange, route: Route) -> None:
        """Do nothing. An error would break clients, which unregister all kinds of regions before they register a region."""
        exchange.reply_empty()


def metrics_handler(control: ControlPlane) -> Handler:
    """Returns a handler that answers with the metrics page."""

    async def write(exchange: Exchange) -> None:
        await exchange.begin_control()
        exchange.reply(200, b"Content-Type: %b\r\n" % CONTENT_TYPE.encode(), await control.metrics_page())

    def metrics(exchange: Exchange, route: Route) -> None:
        """Metrics of all models, for Prometheus."""
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
    """The parameters of a load, with the files (``file:…``) decoded from base64. Raises InvalidArgument."""
    decoded = dict(parameters)
    for name, value in parameters.items():
        if is_file(name):
            try:
                # Decode in pieces, so that other threads can run in between.
                pieces = (value[start : start + _PIECE] for start in range(0, len(value), _PIECE))
                decoded[name] = b"".join([base64.b64decode(piece, validate=True) for piece in pieces])
            except (TypeError, ValueError):
                raise InvalidArgument(f"{quoted(name)} is not base64") from None
    return decoded
