"""Loads, checks and warms up model versions. All functions here block, so call them on a thread, not on the event loop."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import PenstockError, ResourceExhausted, Unavailable
from penstock.online.instances.process_instance import ModelProcess, ProcessModel
from penstock.online.instances.python.process import PythonProcess
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.memory import give_back, low_priority
from penstock.online.repository.loading.merging import unmerged
from penstock.online.repository.loading.warm_up import prepare
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.policy import choose
from penstock.online.repository.resolved_version import LoadOptions, ResolvedVersion, find
from penstock.online.repository.triton.auto_complete import Model
from penstock.online.repository.triton.backend import PYTHON
from penstock.online.repository.triton.rules import prefix
from penstock.online.repository.triton.schema import to_json
from penstock.resources import usable_memory

_log = logging.getLogger(__name__)


class LoadedVersion(msgspec.Struct, frozen=True):
    """A model version in memory, warmed up."""

    resolved: ResolvedVersion
    models: tuple[Model, ...]
    """One model per instance. If a model is reentrant and runs on a single thread, all instances share it."""
    config: ModelConfig
    """The completed configuration."""
    load_s: float = 0.0
    """Seconds of loading and warm-up."""

    def drop(self) -> None:
        """Unload the models. Blocks."""
        for model in self.models:
            model.unload()


class Preloaded(msgspec.Struct, frozen=True):
    """A model version in memory. The warm-up is done later, because a warm-up call that hangs would block the server's start."""

    resolved: ResolvedVersion
    """The resolved version, without the model's bytes."""
    models: tuple[Model, ...]
    unmerged: str
    """The result of ``unmerged``, stored because computing it needs the model's bytes."""


class FilesChanged(Unavailable):
    """A model's files changed while it was being loaded."""


def load(
    resolved: ResolvedVersion, usable_bytes: int | None = None, preloaded: Preloaded | None = None
) -> LoadedVersion:
    """Load and warm up the model of every instance. Models that are ``preloaded`` are only warmed up.

    ``usable_bytes`` is the memory that this process may use; None means the memory of the machine or its cgroup. Raises the
    engine's errors, prefixed with the model's name. Raises ResourceExhausted if there is too little memory, and Unavailable if
    ``resolved.load_options.halt`` ends the child processes. After an error, no model stays in memory.
    """
    models: list[Model] = list(preloaded.models) if preloaded else []
    started = time.monotonic()
    try:
        if not models:
            _check_memory(resolved, usable_memory() if usable_bytes is None else usable_bytes)
            for model in _in_processes(resolved) if resolved.is_apart else _in_threads(resolved):
                models.append(model)  # noqa: PERF402 - if a later model fails, the earlier ones are unloaded below
        config = prepare(resolved, models, preloaded.unmerged if preloaded else None)
        _release(resolved, models)
        if resolved.load_options.halt.reason and resolved.is_apart:
            raise Unavailable(resolved.load_options.halt.reason)
    except (PenstockError, MemoryError) as error:
        _release(resolved, models)
        for model in models:
            model.unload()
        if resolved.load_options.halt.reason:
            raise Unavailable(f"model '{resolved.name}' is not loaded: {resolved.load_options.halt.reason}") from None
        if isinstance(error, MemoryError):
            raise ResourceExhausted(
                f"model '{resolved.name}' cannot be warmed up with batches of {resolved.max_batch} rows: too little memory",
                "use a smaller 'max_batch'",
            ) from None
        error.message = prefix(resolved.name) + error.message.removeprefix(prefix(resolved.name))
        raise
    return LoadedVersion(resolved, tuple(models), config, time.monotonic() - started)


def load_version(layout: Layout, source: ModelSource, version: str, load_options: LoadOptions) -> LoadedVersion:
    """Resolve and load one version of a model.

    Raises the same errors as ``find`` and ``load``. Raises FilesChanged if the model's files change during the load.
    """
    try:
        return _load_quietly(layout, source, find(source, version, load_options))
    except PenstockError:
        refuse_changes(layout, source)
        raise


def _load_quietly(layout: Layout, source: ModelSource, resolved: ResolvedVersion) -> LoadedVersion:
    """Like ``load``, but with low priority. Also raises FilesChanged."""
    with low_priority(leaves_threads=resolved.has_own_threads, starts_processes=resolved.is_apart):
        loaded = load(resolved)
    try:
        refuse_changes(layout, source)
    except PenstockError:
        loaded.drop()
        raise
    return loaded


def warm(preloaded: Preloaded, load_options: LoadOptions) -> LoadedVersion:
    """Warm up a model that is in memory. Raises the same errors as ``load``."""
    resolved = msgspec.structs.replace(preloaded.resolved, load_options=load_options)
    with low_priority(leaves_threads=False):
        return load(resolved, preloaded=preloaded)


def preload(layout: Layout, names: Iterable[str], load_options: LoadOptions) -> dict[tuple[str, str], Preloaded]:
    """Load the models ``names`` before the event loop starts, without a warm-up. Returns them by name and version.

    Skips models that keep threads, because threads do not survive a fork. Also skips models that cannot be loaded.
    """
    found = {}
    for name in names:
        with suppress(PenstockError):
            model = layout.define(name)
            for version in () if model.is_ensemble else choose(model.given.version_policy, model.versions).versions:
                resolved = find(model, version, load_options)
                if not resolved.has_own_threads:
                    _check_memory(resolved, usable_memory())
                    models = tuple(_in_threads(resolved))
                    reason = unmerged(resolved, models[0])
                    # The bytes of the file would take as much memory as the model.
                    artifact = msgspec.structs.replace(resolved.artifact, data=b"", contents={})
                    resolved = msgspec.structs.replace(resolved, artifact=artifact)
                    found[name, version] = Preloaded(resolved, models, reason)
    give_back()
    return found


def load_more(
    layout: Layout, source: ModelSource, version: str, load_options: LoadOptions, first: Model, count: int
) -> Sequence[Model]:
    """Load models for ``count`` more instances of a version. ``first`` is its first model. Raises as ``load_version`` does."""
    resolved = find(source, version, load_options)
    if _is_shared(first, resolved):
        return [first] * count
    return _load_quietly(layout, source, msgspec.structs.replace(resolved, instances=count)).models


def refuse_changes(layout: Layout, source: ModelSource) -> None:
    """Raise FilesChanged if the model's files differ from those that ``source`` describes."""
    if layout.fingerprint(source.name) != source.fingerprint:
        raise FilesChanged(f"the files of model '{source.name}' are being written", "load it when they are complete")


def _check_memory(resolved: ResolvedVersion, usable_bytes: int) -> None:
    """Compare the engine's memory estimate for one loaded copy with ``usable_bytes`` (0: unknown). Python models have no estimate.

    The estimate is an upper bound, so an estimate above ``usable_bytes`` only causes a warning. Raises ResourceExhausted if the
    model's files alone are larger than ``usable_bytes``.
    """
    if resolved.engine == PYTHON or not usable_bytes:
        return
    needed = get_engine(resolved.engine).estimate(resolved.artifact, resolved.options).memory_bytes
    size = resolved.artifact.size_bytes
    if size > usable_bytes:
        raise ResourceExhausted(
            f"its files take {_gib(size)} of memory, but this process may use only {_gib(usable_bytes)}",
            "use a smaller model, or raise the memory limit",
        )
    if needed > usable_bytes:
        text = "model '%s' may need up to %s of memory, but this process may use only %s"
        _log.warning(text, resolved.name, _gib(needed), _gib(usable_bytes))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def _is_shared(model: Model, resolved: ResolvedVersion) -> bool:
    # Instances that share a model with a thread pool would wait for each other in the pool.
    return model.reentrant and not resolved.is_apart and resolved.options.get("threads") == 1


def _in_threads(resolved: ResolvedVersion) -> Iterator[LoadedModel]:
    engine = get_engine(resolved.engine)
    first = engine.load(resolved.artifact, resolved.options)
    yield first
    for _ in range(1, resolved.instances):
        yield first if _is_shared(first, resolved) else engine.load(resolved.artifact, resolved.options)


def _in_processes(resolved: ResolvedVersion) -> Iterator[Model]:
    kind = PythonProcess if resolved.engine == PYTHON else ProcessModel
    file = resolved.artifact.in_memory()
    try:
        for number in range(resolved.instances):
            yield kind.load(
                resolved.engine,
                resolved.artifact,
                _python_options(resolved, number) if resolved.engine == PYTHON else resolved.options,
                file,
                resolved.cores[number] if resolved.cores else (),
                resolved.load_options.model_timeout_s,
                halt=resolved.load_options.halt,
            )
    finally:
        os.close(file)


def _release(resolved: ResolvedVersion, models: Iterable[Model]) -> None:
    for model in models:
        if isinstance(model, ModelProcess):
            resolved.load_options.halt.release(model)


def _python_options(resolved: ResolvedVersion, number: int) -> dict[str, Any]:
    """The options of instance ``number`` of a Python model."""
    given = resolved.given
    return {
        **resolved.options,
        "name": resolved.name,
        "version": resolved.version,
        "instance": f"{resolved.name}_{number}",
        "instances": resolved.instances,
        "max_batch": given.max_batch_size,
        "config": to_json(given),
    }
