"""All resources of the HTTP ports."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable
from contextlib import suppress

from penstock.errors import NotFound, PermissionDenied, Unauthenticated
from penstock.online.repository.state import Row
from penstock.online.server.access.auth import Access
from penstock.online.server.access.web import host_name
from penstock.online.server.config import Dialect, ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.home_page import MOST_MODELS, HomePage, body, whole
from penstock.online.server.http import compression
from penstock.online.server.http.answer import JSON
from penstock.online.server.http.api import Api, metrics_handler
from penstock.online.server.http.dialects.run import HttpRun
from penstock.online.server.http.dialects.tensorflow_serving import TensorFlowServing
from penstock.online.server.http.dialects.torchserve import TorchServe
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.http.generate import Generation
from penstock.online.server.http.inference import HttpInference
from penstock.online.server.http.openapi import document
from penstock.online.server.http.routes import Handler, Resource, Route
from penstock.online.server.to_thread import finish

_LISTING = (b"/v2/repository/index", b"/v2")
"""The page of the server shows models to clients that may use these resources."""


def make_resources(dataplane: DataPlane, control: ControlPlane, access: Access, config: ServerConfig) -> list[Resource]:
    """The Open Inference Protocol, the dialects that ``config`` enables, and their OpenAPI description."""

    @functools.cache
    def describe(encoding: bytes) -> bytes:
        text = document(resources)
        return finish(compression.compress([text], encoding)) if encoding else text

    def openapi(exchange: Exchange, route: Route) -> None:
        """This OpenAPI description."""
        encoding = exchange.head.accepted
        exchange.sink.answered(exchange, 200, JSON + compression.headers(encoding), describe(encoding))

    rest = TensorFlowServing(dataplane, control, access, metrics_handler(control) if config.allow_metrics else None)
    dialects: dict[Dialect, list[Resource]] = {
        "tensorflow-serving": rest.resources(),
        "kserve-v1": rest.kserve_resources(),
        "torchserve": TorchServe(dataplane, openapi).resources(),
    }
    home = Home(dataplane, control, access, config, rest.alive if "kserve-v1" in config.dialects else None)
    resources = [
        *Api(dataplane, control, access).resources(),
        *HttpInference(dataplane).resources(),
        *HttpRun(dataplane).resources(),
        *Generation(dataplane).resources(),
        Resource("/openapi.json", {b"GET": openapi}, answer="Settings"),
        *merge([home.resources(), *(dialects[dialect] for dialect in config.dialects)]),
    ]
    return resources


class Home:
    """The handler of ``/``: a page for browsers, and the response of KServe v1 for all other clients."""

    def __init__(
        self, dataplane: DataPlane, control: ControlPlane, access: Access, config: ServerConfig, alive: Handler | None
    ) -> None:
        """``alive`` answers clients that do not prefer HTML. If it is None, they get 404."""
        self._dataplane, self._control, self._access, self._config = dataplane, control, access, config
        self._alive = alive

    def resources(self) -> list[Resource]:
        return [Resource("/", {b"GET": self.show}, answer="Anything")]

    def show(self, exchange: Exchange, route: Route) -> None:
        """200 while the process answers. For browsers, a page that lists the models."""
        if exchange.head.prefers_html:
            exchange.later(self._show_page(exchange))
        elif self._alive is not None:
            self._alive(exchange, route)
        else:
            exchange.fail_with(404, "Not Found")

    async def _show_page(self, exchange: Exchange) -> None:
        await exchange.begin_control()
        rows = await self._rows(exchange)
        configs = {}
        for name in list(dict.fromkeys(row["name"] for row in rows or ()))[:MOST_MODELS]:
            with suppress(NotFound):
                configs[name] = self._dataplane.model_config(name)
        host = (exchange.head.sender.host or b"").decode() or f"{self._config.host}:{self._config.http_port}"
        scheme = "https" if self._config.tls_certificate and self._config.http_tls else "http"
        address, needs_key = f"{scheme}://{host}", self._access.enabled
        forms = "torchserve" in self._config.dialects and not needs_key
        home = HomePage(address, rows, configs, self._metrics_url(host), needs_key, forms)
        pieces = []
        for piece in body(home):
            pieces.append(piece)
            await asyncio.sleep(0)
        page, headers = whole(home, pieces)
        exchange.reply(200, headers, page)

    async def _rows(self, exchange: Exchange) -> list[Row] | None:
        """The rows of the repository index that the client may see; None if it may not list models."""
        head, client = exchange.head, ""
        try:
            for path in _LISTING:
                if (guard := exchange.sink.context.routes[path].guard) is not None:
                    client = guard(head.credential, head.keys)
        except (Unauthenticated, PermissionDenied):
            return None
        return [row for row in await self._control.repository_index() if self._access.may(client, row["name"])]

    def _metrics_url(self, host: str) -> str:
        """The URL of the metrics for a client that reached the server as ``host``; empty if it is not known."""
        config = self._config
        if not config.allow_metrics:
            return ""
        if "tensorflow-serving" in config.dialects and not self._access.enabled:
            return "/monitoring/prometheus/metrics"
        name, port = host_name(host.encode()), config.port("metrics")
        is_known = port and not config.metrics_host
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/metrics" if is_known else ""


def metrics_resources(control: ControlPlane) -> list[Resource]:
    """The resources of the metrics port."""
    return [Resource("/metrics", {b"GET": metrics_handler(control)})]


def merge(dialects: Iterable[Iterable[Resource]]) -> list[Resource]:
    """Combine the resources of ``dialects``. Resources with equal paths are merged. Paths with a ``:verb`` come first."""
    merged: dict[str, Resource] = {}
    for resources in dialects:
        for resource in resources:
            known = merged.get(resource.path, resource)
            handlers: dict[bytes, Handler] = {**resource.handlers, **known.handlers}
            merged[resource.path] = known._replace(handlers=handlers)
    return sorted(merged.values(), key=lambda resource: ":" not in resource.path)
