"""From a source to a model in memory, warmed up and checked. All of it blocks and belongs on a thread, not on the event loop."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from penstock.engines.base import LoadedModel, RequestModel
from penstock.engines.registry import get_engine
from penstock.errors import PenstockError, ResourceExhausted, Unavailable
from penstock.online.instances.process_instance import ModelProcess, ProcessModel
from penstock.online.instances.python.process import PythonProcess
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.memory import give_back, low_priority
from penstock.online.repository.loading.warm_up import prepare
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.policy import choose
from penstock.online.repository.resolved_version import LoadOptions, ResolvedVersion, find
from penstock.online.repository.triton.backend import PYTHON
from penstock.online.repository.triton.rules import prefix
from penstock.online.repository.triton.schema import to_json
from penstock.resources import usable_memory

_Model = LoadedModel | RequestModel
_log = logging.getLogger(__name__)


class LoadedVersion(msgspec.Struct, frozen=True):
    """A warm model in memory. ``models`` holds one copy per instance, or the same one for each if it is reentrant and has one
    thread."""

    resolved: ResolvedVersion
    models: tuple[_Model, ...]
    config: ModelConfig
    """Completed."""
    load_s: float = 0.0
    """How long loading and warming up took."""

    @property
    def platform(self) -> str:
        """As in ``ResolvedVersion``."""
        return self.resolved.platform

    def drop(self) -> None:
        """Give the memory back. Blocks."""
        for model in self.models:
            model.unload()


class Preloaded(msgspec.Struct, frozen=True):
    """A model version that is in memory before there is an event loop."""

    loaded: LoadedVersion
    fingerprint: str
    """The model's fingerprint when it was loaded."""


class FilesChanged(Unavailable):
    """A model's files are being written while it is loaded."""


def load(resolved: ResolvedVersion, usable_bytes: int | None = None) -> LoadedVersion:
    """Load every instance's model and warm each up.

    ``usable_bytes`` is the memory that this process may use; None: that of the machine or its cgroup.
    Raises what the engine raises, with the model's name in front, ResourceExhausted if there is too little memory, and Unavailable if
    ``resolved.load_options.halt`` ends its processes; then nothing stays in memory.
    """
    models: list[_Model] = []
    started = time.monotonic()
    try:
        _check_memory(resolved, usable_memory() if usable_bytes is None else usable_bytes)
        for model in _in_processes(resolved) if resolved.is_apart else _in_threads(resolved):
            models.append(model)  # noqa: PERF402 - those before one that fails are unloaded below
        config = prepare(resolved, models)
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
        error.message = prefix(resolved.name, "") + error.message.removeprefix(prefix(resolved.name, ""))
        raise
    return LoadedVersion(resolved, tuple(models), config, time.monotonic() - started)


def load_version(layout: Layout, source: ModelSource, version: str, load_options: LoadOptions) -> LoadedVersion:
    """Find and load one version of a model. Raises as ``find`` and ``load``, and FilesChanged if meanwhile the model's files do."""
    try:
        return _load_in_peace(layout, source, find(source, version, load_options))
    except PenstockError:
        _refuse_changes(layout, source)
        raise


def _load_in_peace(layout: Layout, source: ModelSource, resolved: ResolvedVersion) -> LoadedVersion:
    """``load`` that others hardly notice. Raises FilesChanged, too."""
    with low_priority(leaves_threads=resolved.has_own_threads, starts_processes=resolved.is_apart):
        loaded = load(resolved)
    try:
        _refuse_changes(layout, source)
    except PenstockError:
        loaded.drop()
        raise
    return loaded


def preload(layout: Layout, names: Iterable[str], load_options: LoadOptions) -> dict[tuple[str, str], Preloaded]:
    """By name and version those of the models ``names`` without threads; models that cannot be loaded are left out."""
    found = {}
    for name in names:
        with suppress(PenstockError):
            model = layout.define(name)
            for version in () if model.is_ensemble else choose(model.given.version_policy, model.versions).versions:
                resolved = find(model, version, load_options)
                if not resolved.has_own_threads:
                    found[name, version] = Preloaded(_without_bytes(load(resolved)), model.fingerprint)
    give_back()
    return found


def _without_bytes(loaded: LoadedVersion) -> LoadedVersion:
    """``loaded`` for keeping: what it was loaded from is as large as itself."""
    artifact = msgspec.structs.replace(loaded.resolved.artifact, data=b"", contents={})
    return msgspec.structs.replace(loaded, resolved=msgspec.structs.replace(loaded.resolved, artifact=artifact))


def load_more(
    layout: Layout, source: ModelSource, version: str, load_options: LoadOptions, first: _Model, count: int
) -> Sequence[_Model]:
    """Models for ``count`` more instances of a version whose ``first`` model is loaded. Raises as
    ``load_version``."""
    resolved = find(source, version, load_options)
    if _is_shared(first, resolved):
        return [first] * count
    return _load_in_peace(layout, source, msgspec.structs.replace(resolved, instances=count)).models


def _refuse_changes(layout: Layout, source: ModelSource) -> None:
    if layout.fingerprint(source.name) != source.fingerprint:
        raise FilesChanged(f"the files of model '{source.name}' are being written", "load it when they are complete")


def _check_memory(resolved: ResolvedVersion, usable_bytes: int) -> None:
    """Compare the engine's estimate for one copy with ``usable_bytes``; 0 is unknown. Python models have no estimate.

    The estimate is an upper bound, so it only warns. Raises ResourceExhausted if the model's files alone are larger.
    """
    if resolved.engine == PYTHON or not usable_bytes:
        return
    needed = get_engine(resolved.engine).estimate(resolved.artifact, resolved.options).memory_bytes
    size = resolved.artifact.size_bytes
    if size > usable_bytes:
        raise ResourceExhausted(
            f"its files take {_gib(size)} of memory, and this process may use {_gib(usable_bytes)}",
            "use a smaller model, or raise the memory limit",
        )
    if needed > usable_bytes:
        text = "model '%s' may need up to %s of memory, and this process may use %s"
        _log.warning(text, resolved.name, _gib(needed), _gib(usable_bytes))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def _is_shared(model: _Model, resolved: ResolvedVersion) -> bool:
    # Instances that share a model with a thread pool would wait for each other in it.
    return model.reentrant and not resolved.is_apart and resolved.options.get("threads") == 1


def _in_threads(resolved: ResolvedVersion) -> Iterator[LoadedModel]:
    engine = get_engine(resolved.engine)
    first = engine.load(resolved.artifact, resolved.options)
    yield first
    for _ in range(1, resolved.instances):
        yield first if _is_shared(first, resolved) else engine.load(resolved.artifact, resolved.options)


def _in_processes(resolved: ResolvedVersion) -> Iterator[_Model]:
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


def _release(resolved: ResolvedVersion, models: Iterable[_Model]) -> None:
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
