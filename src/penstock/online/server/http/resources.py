"""All resources of the HTTP ports."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from penstock.online.server.access.auth import Access
from penstock.online.server.config import Dialect, ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http import compression
from penstock.online.server.http.answer import JSON
from penstock.online.server.http.api import Api, metrics_handler
from penstock.online.server.http.dialects.tensorflow_serving import TensorFlowServing
from penstock.online.server.http.dialects.torchserve import TorchServe
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.http.generate import Generation
from penstock.online.server.http.inference import HttpInference
from penstock.online.server.http.openapi import document
from penstock.online.server.http.routes import Handler, Resource, Route
from penstock.online.server.offload import finish


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
    resources = [
        *Api(dataplane, control, access).resources(),
        *HttpInference(dataplane).resources(),
        *Generation(dataplane).resources(),
        Resource("/openapi.json", {b"GET": openapi}, answer="Settings"),
        *merge(dialects[dialect] for dialect in config.dialects),
    ]
    return resources


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
