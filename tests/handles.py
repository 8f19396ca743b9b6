"""Handles on fake models, put together as the server does it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from penstock.engines.base import LoadedModel, RequestModel
from penstock.online.instances.instance import Instance
from penstock.online.repository.handle import Handle
from penstock.online.repository.loading.input_check import InputCheck
from penstock.online.repository.loading.scheduling import batching
from penstock.online.repository.triton.auto_complete import complete
from penstock.online.repository.triton.check import parse
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.telemetry.statistics import ModelStatistics
from penstock.tensor import Signature, TensorSpec


def described(*inputs: TensorSpec, name: str = "m") -> Handle:
    """As much of a handle as decoders look at."""
    return cast(Handle, SimpleNamespace(name=name, version="1", signature=Signature(inputs, ())))


def make_handle(
    model: LoadedModel | RequestModel,
    name: str = "m",
    version: str = "1",
    *,
    max_batch: int | None = 8,
    max_queue: int = 4096,
    instances: int = 1,
    settings: Mapping[str, Any] | None = None,
    **parts: Any,
) -> Handle:
    """A handle on ``model``, not started; ``settings`` are those of its configuration, ``parts`` go to
    the handle. Needs a running event loop."""
    given, decoupled = parse(name, settings or {}), isinstance(model, RequestModel) and model.decoupled
    config = complete(given, name, "fake", model.signature, max_batch, instances, decoupled=decoupled)
    batcher = DynamicBatcher(
        batching(config, max_queue), asyncio.get_running_loop(), ModelStatistics(name=name, version=version)
    )
    check = InputCheck(config, max_batch or 1)
    runs = [Instance(f"{name}-{number}", model, batcher) for number in range(instances)]
    return Handle(version, config, check, batcher, [model] * instances, runs, **parts)
