"""From a source to a model in memory, warmed up and checked. All of it blocks and belongs on a thread, not on the event loop."""

from __future__ import annotations

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
from penstock.online.repository.definition import Definition
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.memory import give_back, low_priority
from penstock.online.repository.loading.warm_up import prepare
from penstock.online.repository.policy import choose
from penstock.online.repository.source import Source, Wishes, find
from penstock.online.repository.triton.rules import prefix
from penstock.online.repository.triton.schema import to_json

_Model = LoadedModel | RequestModel


class Loaded(msgspec.Struct, frozen=True):
    """A warm model in memory. ``models`` holds one copy per instance, or the same one for each if it is reentrant and has one
    thread."""

    source: Source
    models: tuple[_Model, ...]
    config: ModelConfig
    """Completed."""
    load_s: float = 0.0
    """How long loading and warming up took."""

    @property
    def platform(self) -> str:
        """As in ``Source``."""
        return self.source.platform

    def drop(self) -> None:
        """Give the memory back. Blocks."""
        for model in self.models:
            model.unload()


class Preloaded(msgspec.Struct, frozen=True):
    """A model version that is in memory before there is an event loop."""

    loaded: Loaded
    fingerprint: str
    """What its model's was then."""


class FilesChanged(Unavailable):
    """A model's files are being written while it is loaded."""


def load(source: Source) -> Loaded:
    """Load every instance's model and warm each up.

    Raises what the engine raises, with the model's name in front, ResourceExhausted if there is too little memory, and Unavailable if
    ``source.halt`` ends its processes; then nothing stays in memory.
    """
    models: list[_Model] = []
    started = time.monotonic()
    try:
        for model in _in_processes(source) if _is_apart(source) else _in_threads(source):
            models.append(model)  # noqa: PERF402 - those before one that fails are unloaded below
        config = prepare(source, models)
        _release(source, models)
        if source.halt.reason and _is_apart(source):
            raise Unavailable(source.halt.reason)
    except (PenstockError, MemoryError) as error:
        _release(source, models)
        for model in models:
            model.unload()
        if source.halt.reason:
            raise Unavailable(f"model '{source.name}' is not loaded: {source.halt.reason}") from None
        if isinstance(error, MemoryError):
            raise ResourceExhausted(
                f"model '{source.name}' cannot be warmed up with batches of {source.max_batch} rows: too little memory",
                "use a smaller 'max_batch'",
            ) from None
        error.message = prefix(source.name, "") + error.message.removeprefix(prefix(source.name, ""))
        raise
    return Loaded(source, tuple(models), config, time.monotonic() - started)


def load_version(layout: Layout, definition: Definition, version: str, wishes: Wishes) -> Loaded:
    """Find and load one version of a model. Raises as ``find`` and ``load``, and FilesChanged if meanwhile the model's files do."""
    try:
        return _load_in_peace(layout, definition, find(definition, version, wishes))
    except PenstockError:
        _refuse_changes(layout, definition)
        raise


def _load_in_peace(layout: Layout, definition: Definition, source: Source) -> Loaded:
    """``load`` that others hardly notice. Raises FilesChanged, too."""
    with low_priority(leaves_threads=source.has_own_threads, starts_processes=_is_apart(source)):
        loaded = load(source)
    try:
        _refuse_changes(layout, definition)
    except PenstockError:
        loaded.drop()
        raise
    return loaded


def preload(layout: Layout, names: Iterable[str], wishes: Wishes) -> dict[tuple[str, str], Preloaded]:
    """By name and version those of the models ``names`` that have no threads of their own; what cannot be loaded is left out."""
    found = {}
    for name in names:
        with suppress(PenstockError):
            model = layout.define(name)
            for version in () if model.is_ensemble else choose(model.given.version_policy, model.versions).versions:
                source = find(model, version, wishes)
                if not source.has_own_threads:
                    found[name, version] = Preloaded(_without_bytes(load(source)), model.fingerprint)
    give_back()
    return found


def _without_bytes(loaded: Loaded) -> Loaded:
    """``loaded`` for keeping: what it was loaded from is as large as itself."""
    artifact = msgspec.structs.replace(loaded.source.artifact, data=b"")
    return msgspec.structs.replace(loaded, source=msgspec.structs.replace(loaded.source, artifact=artifact))


def load_more(
    layout: Layout, definition: Definition, version: str, wishes: Wishes, first: _Model, count: int
) -> Sequence[_Model]:
    """Models for ``count`` more instances of a version whose ``first`` model is loaded. Raises as
    ``load_version``."""
    source = find(definition, version, wishes)
    if _is_shared(first, source):
        return [first] * count
    return _load_in_peace(layout, definition, msgspec.structs.replace(source, instances=count)).models


def _refuse_changes(layout: Layout, definition: Definition) -> None:
    if layout.fingerprint(definition.name) != definition.fingerprint:
        raise FilesChanged(
            f"the files of model '{definition.name}' are being written", "load it when they are complete"
        )


def _is_apart(source: Source) -> bool:
    """Whether it runs in processes of its own."""
    return source.isolation == "process" or source.engine == "python"


def _is_shared(model: _Model, source: Source) -> bool:
    # With threads of its own a shared model would have its users queue up for one pool.
    return model.reentrant and source.isolation != "process" and source.options.get("threads") == 1


def _in_threads(source: Source) -> Iterator[LoadedModel]:
    engine = get_engine(source.engine)
    first = engine.load(source.artifact, source.options)
    yield first
    for _ in range(1, source.instances):
        yield first if _is_shared(first, source) else engine.load(source.artifact, source.options)


def _in_processes(source: Source) -> Iterator[_Model]:
    kind = PythonProcess if source.engine == "python" else ProcessModel
    file = source.artifact.in_memory()
    try:
        for number in range(source.instances):
            yield kind.load(
                source.engine,
                source.artifact,
                _python_options(source, number) if source.engine == "python" else source.options,
                file,
                source.cores[number] if source.cores else (),
                source.model_timeout_s,
                halt=source.halt,
            )
    finally:
        os.close(file)


def _release(source: Source, models: Iterable[_Model]) -> None:
    for model in models:
        if isinstance(model, ModelProcess):
            source.halt.release(model)


def _python_options(source: Source, number: int) -> dict[str, Any]:
    """What instance ``number`` of a Python model is told."""
    given = source.given
    return {
        **source.options,
        "name": source.name,
        "version": source.version,
        "instance": f"{source.name}_{number}",
        "instances": source.instances,
        "max_batch": given.max_batch_size,
        "config": to_json(given),
    }
