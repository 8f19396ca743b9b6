"""From a source to a model in memory, warmed up and checked. All of it blocks and belongs on a thread, not on the event loop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import msgspec

from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.repository.source import Source
from penstock.online.repository.warm_up import warm_up
from penstock.online.scheduler.process_instance import ProcessModel, store_model


class Loaded(msgspec.Struct, frozen=True):
    """A model in memory, warm. ``models`` holds one copy per instance, or the same one for each if it is reentrant and has one
    thread."""

    source: Source
    models: tuple[LoadedModel, ...]
    max_batch: int | None
    """None if requests cannot be merged."""
    load_s: float = 0.0
    """How long loading and warming up took."""

    @property
    def platform(self) -> str:
        """The protocol's name for what runs it."""
        return f"{self.source.engine}_onnx" if self.source.engine == "onnxruntime" else self.source.engine


def load(source: Source) -> Loaded:
    """Load every instance's model and warm each up.

    Raises what the engine raises, with the model's name in front, and ResourceExhausted if there is too little memory; then nothing
    stays in memory.
    """
    models: list[LoadedModel] = []
    started = time.monotonic()
    try:
        for model in _in_processes(source) if source.isolation == "process" else _in_threads(source):
            models.append(model)  # noqa: PERF402 - those before one that fails are unloaded below
        batchable = [warm_up(model, source.max_batch, source.name) for model in models]
    except (PenstockError, MemoryError) as error:
        for model in models:
            model.unload()
        if isinstance(error, MemoryError):
            raise ResourceExhausted(
                f"model '{source.name}' cannot be warmed up with batches of {source.max_batch} rows: too little memory",
                "use a smaller 'max_batch'",
            ) from None
        error.message = f"model '{source.name}': {error.message}"
        raise
    return Loaded(source, tuple(models), source.max_batch if all(batchable) else None, time.monotonic() - started)


def _in_threads(source: Source) -> Iterator[LoadedModel]:
    engine = get_engine(source.engine)
    first = engine.load(source.artifact, source.options)
    yield first
    # With threads of its own a shared model would have its users queue up for one pool.
    is_shared = first.reentrant and source.options.get("threads") == 1
    for _ in range(1, source.instances):
        yield first if is_shared else engine.load(source.artifact, source.options)


def _in_processes(source: Source) -> Iterator[LoadedModel]:
    file = store_model(source.artifact)
    try:
        for number in range(source.instances):
            yield ProcessModel.load(
                source.engine,
                source.artifact,
                source.options,
                file,
                source.cores[number] if source.cores else (),
                source.model_timeout_s,
            )
    finally:
        os.close(file)
