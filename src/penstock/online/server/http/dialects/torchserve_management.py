"""TorchServe's management: what it calls registering, scaling and unregistering, done by the model repository."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import orjson

from penstock.errors import InvalidArgument, Unsupported
from penstock.online.repository.triton.model_config import to_json
from penstock.online.server.http.dialects.nested import read_object
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.http.routes import Route
from penstock.protocol.messages import Message

if TYPE_CHECKING:
    from penstock.online.server.http.shared import Shared

_MAX_FIELDS = 64
_MAX_WORKERS = 1024  # and models on a page
_NAME = re.compile(r"[A-Za-z0-9][\w.@-]*")
_KIND_GPU = 1


async def list_models(exchange: Exchange, route: Route) -> dict[str, Any]:
    """Names of the models that are ready, a page at a time: those that are not are not registered."""
    query = _query(route)
    limit, start = _number(query, "limit", 100, 1), _number(query, "next_page_token", 0, most=2**30)
    rows = await exchange.line.shared.control.repository_index(ready=True)
    names = list(dict.fromkeys(row["name"] for row in rows))
    page: dict[str, Any] = {"models": [{"modelName": name, "modelUrl": name} for name in names[start : start + limit]]}
    return page | ({"nextPageToken": str(start + limit)} if start + limit < len(names) else {})


async def describe(exchange: Exchange, route: Route) -> list[dict[str, Any]]:
    """Instances, batching and queue of one version."""
    versions = _versions(exchange, route.model, route.version)
    return await _describe(exchange, route.model, [route.version or versions[-1]])


async def describe_all(exchange: Exchange, route: Route) -> list[dict[str, Any]]:
    """The same of all versions."""
    return await _describe(exchange, route.model, _versions(exchange, route.model))


async def register(exchange: Exchange, route: Route) -> dict[str, str]:
    """Load a model that is in the repository."""
    query: dict[str, Any] = _query(route)
    if exchange.head.content_type.lower().startswith(b"application/json"):
        query |= read_object(exchange.body)
    url = query.get("url", "")
    name = url.removesuffix(".mar") if isinstance(url, str) else ""
    if not _NAME.fullmatch(name):
        raise InvalidArgument("'url' is not the name of a model", "name one of the repository: nothing is fetched")
    if query.get("model_name", name) != name:
        raise Unsupported(f"model '{name}' keeps its name", "leave out 'model_name'")
    workers = _number(query, "initial_workers", 0)
    shared = exchange.line.shared
    await shared.control.load(name, {})
    config = shared.dataplane.model_config(name)
    if workers not in (0, _instances(config)):
        await _set_instances(exchange, config, workers)
        config = shared.dataplane.model_config(name)
    version = _versions(exchange, name)[-1]
    return {"status": f'Model "{name}" Version: {version} registered with {_instances(config)} initial workers'}


async def scale(exchange: Exchange, route: Route) -> dict[str, str]:
    """Set the number of a model's instances."""
    query = _query(route)
    least = _number(query, "min_worker", 1)
    if _number(query, "max_worker", least) < least:
        raise InvalidArgument("max_worker cannot be less than min_worker")
    if not least:
        raise Unsupported("a loaded model has at least one worker", "unregister it with DELETE")
    _check_only_version(exchange, route)
    config = exchange.line.shared.dataplane.model_config(route.model, route.version)
    if _instances(config) != least:
        await _set_instances(exchange, config, least)
    version = f", version: {route.version}" if route.version else ""
    return {"status": f"Workers scaled to {least} for model: {route.model}{version}"}


async def unregister(exchange: Exchange, route: Route) -> dict[str, str]:
    """Unload a model."""
    _check_only_version(exchange, route)
    await exchange.line.shared.control.unload(route.model, {})
    return {"status": f'Model "{route.model}" unregistered'}


def set_default(exchange: Exchange, route: Route) -> None:
    """Not done: which version is the default follows from the model's version policy."""
    raise Unsupported("the default version is the greatest that is served", "change the model's 'version_policy'")


async def _describe(exchange: Exchange, name: str, versions: list[str]) -> list[dict[str, Any]]:
    shared = exchange.line.shared
    pending = {one.version: one.pending for one in await shared.control.all_statistics() if one.name == name}
    return [_description(shared, name, version, pending.get(version, 0)) for version in versions]


def _description(shared: Shared, name: str, version: str, pending: int) -> dict[str, Any]:
    config = shared.dataplane.model_config(name, version)
    status = "READY" if shared.dataplane.model_ready(name, version) else "UNLOADING"
    workers = [group.kind == _KIND_GPU for group in config.instance_group for _ in range(group.count)]
    return {
        "modelName": name,
        "modelVersion": version,
        "modelUrl": name,
        "engine": config.backend,
        "runtime": config.platform,
        "minWorkers": len(workers),
        "maxWorkers": len(workers),
        "batchSize": max(1, config.max_batch_size),
        "maxBatchDelay": config.dynamic_batching.max_queue_delay_microseconds // 1000,
        "workers": [{"id": str(number), "status": status, "gpu": gpu} for number, gpu in enumerate(workers)],
        "jobQueueStatus": {"remainingCapacity": max(0, shared.config.max_queue - pending), "pendingRequests": pending},
    }


async def _set_instances(exchange: Exchange, config: Message, count: int) -> None:
    """Load the model again with its configuration but for that. Raises Unavailable where the repository is not controlled."""
    changed = to_json(config)
    groups = changed["instance_group"][:1] or [{}]
    changed["instance_group"] = [groups[0] | {"count": count}]
    await exchange.line.shared.control.load(config.name, {"config": orjson.dumps(changed).decode()})


def _instances(config: Message) -> int:
    return sum(group.count for group in config.instance_group)


def _check_only_version(exchange: Exchange, route: Route) -> None:
    """Raise NotFound without the model, Unsupported where a version is named and there are others."""
    versions = _versions(exchange, route.model, route.version)
    if route.version and len(versions) > 1:
        raise Unsupported(
            f"model '{route.model}' has versions {versions}", "leave the version out: all change together"
        )


def _versions(exchange: Exchange, name: str, version: str = "") -> list[str]:
    """Those of the model that are served. Raises NotFound."""
    versions: Any = exchange.line.shared.dataplane.model_metadata(name, version)["versions"]
    return list(versions)


def _query(route: Route) -> dict[str, str]:
    """The last value of each parameter in the URL. Raises InvalidArgument."""
    try:
        found = parse_qs(route.query.decode("latin-1"), max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise InvalidArgument(f"the URL's parameters are wrong: {error}") from None
    return {name: values[-1] for name, values in found.items()}


def _number(query: dict[str, Any], name: str, default: int, least: int = 0, most: int = _MAX_WORKERS) -> int:
    text = str(query.get(name, default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise InvalidArgument(f"'{name}' must be a number from {least} to {most}, not '{text[:20]}'")
    return int(text)
