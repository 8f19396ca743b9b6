"""From a target on the command line to models in memory, warmed up and checked.

A target is a bundle, served as its tuner found best, or a plain ``.onnx`` file, served by ONNX Runtime under the file's
stem. Everything here blocks and belongs on a thread of its own, not on the event loop.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.bundle.open import open_bundle
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine, is_available
from penstock.errors import AlreadyExists, NotFound, PenstockError, ResourceExhausted
from penstock.online.scheduler.process_instance import ProcessModel, store_model
from penstock.resources import core_ids, cpu_quota, machine_facts, plan_cores
from penstock.tensor import Array, DataType, Signature

_log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH = 64
_PROBE_ROWS = 4
_TOLERANCE = 1e-2
"""Of an output's largest magnitude."""


Isolation = Literal["thread", "process"]
"""Where the instances of a model run."""


class Wishes(msgspec.Struct, frozen=True):
    """How models are to be served, as far as it is not left to the bundle or the machine."""

    max_batch: int | None = None
    instances: int | None = None
    isolation: Isolation = "thread"
    model_timeout_s: float = 0.0
    """Longest that one call may take in a process of its own; 0 is for ever."""
    processes: int = 1
    """How many processes of this server share the cores."""


_NONE = Wishes()


class Source(msgspec.Struct, frozen=True):
    """A model found and verified, and how to serve it; nothing is loaded yet."""

    name: str
    artifact: Artifact
    engine: str
    options: dict[str, Any]
    max_batch: int
    instances: int
    cores: tuple[tuple[int, ...], ...] = ()
    """For each instance the ids of the cores that are its own; empty if any are."""
    isolation: Isolation = "thread"
    model_timeout_s: float = 0.0
    """As in ``Wishes``."""

    @property
    def has_own_threads(self) -> bool:
        """Whether the loaded model keeps threads of its own."""
        return self.isolation == "process" or self.engine != "onnxruntime" or self.options.get("threads") != 1


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


def find_sources(
    targets: Sequence[str | Path], wishes: Wishes = _NONE, by_name: Mapping[str, Wishes] = {}
) -> list[Source]:
    """What is to be loaded for ``targets``; ``by_name`` holds the wishes for single models, which go before those for all.

    Raises NotFound, InvalidModel, Unsupported, IntegrityError, and AlreadyExists if two targets have one name.
    """
    sources: dict[str, Source] = {}
    for target in targets:
        source = _find(Path(target), wishes, by_name)
        if source.name in sources:
            raise AlreadyExists(f"two targets are called '{source.name}'", "rename one of the files")
        sources[source.name] = source
    return list(sources.values())


def _find(path: Path, wishes: Wishes, by_name: Mapping[str, Wishes]) -> Source:
    if not path.exists():
        raise NotFound(f"no model or bundle '{path}'", "check the path")
    if path.suffix.lower() == ".onnx" and path.is_file():
        artifact = Artifact.from_file(path)
        # Threads that spin would keep the event loop from getting a core.
        options = {"threads": 0, "spinning": False}
        return _source(
            path.stem, artifact, "onnxruntime", options, by_name.get(path.stem, wishes), DEFAULT_MAX_BATCH, 1
        )
    bundle, machine = open_bundle(path), machine_facts()
    variant, serving = bundle.choose(machine, is_available), bundle.manifest.serving
    if variant.name != serving.variant:
        _log.warning(
            "bundle '%s' is served as '%s': '%s' does not run here", bundle.name, variant.name, serving.variant
        )
    if differences := bundle.differences(machine):
        _log.warning(
            "bundle '%s' was tuned on another machine, so its profile may not hold: %s",
            bundle.name,
            "; ".join(differences),
        )
    return _source(
        bundle.name,
        bundle.artifact(variant),
        variant.engine,
        dict(variant.options),
        by_name.get(bundle.name, wishes),
        serving.max_batch,
        min(serving.instances, machine.cores),
    )


def _source(
    name: str, artifact: Artifact, engine: str, options: dict[str, Any], wishes: Wishes, max_batch: int, instances: int
) -> Source:
    """``max_batch`` and ``instances`` hold where nothing else is wished; threads are cut down to the cores that there are."""
    count = wishes.instances or instances
    plan = plan_cores(count * wishes.processes, options.get("threads", 0), core_ids(), cpu_quota())
    if "threads" in options:
        options["threads"] = plan.threads
    return Source(
        name=name,
        artifact=artifact,
        engine=engine,
        options=options,
        max_batch=wishes.max_batch or max_batch,
        instances=count,
        # All processes of a server load alike, so none knows which of the shares are its own.
        cores=plan.cores if wishes.processes == 1 else (),
        isolation=wishes.isolation,
        model_timeout_s=wishes.model_timeout_s,
    )


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


def warm_up(model: LoadedModel, max_batch: int, name: str = "") -> bool:
    """Run batches of 1 and ``max_batch`` of zeros and a few different rows, and say whether requests may be merged.

    They may if the model answers row for row: as many rows as it was given, and the same for a row whatever rows stand beside
    it. If its rows depend on each other, that is logged under ``name``.
    A model may refuse rows in a shape that is only guessed (a free dimension counts as 1); then it stays cold and, as
    nothing is known about its rows, unmerged.
    Raises PenstockError if it refuses the one shape that it declares.
    """
    signature = model.signature
    for batch in (1, max_batch) if signature.batchable else (1,):
        try:
            outputs = model.forward(_zeros(signature, batch))
        except PenstockError:
            if any(-1 in spec.shape[1:] or spec.datatype is DataType.BYTES for spec in signature.inputs):
                return False
            raise
        if signature.batchable and any(array.shape[:1] != (batch,) for array in outputs.values()):
            return False
    if not signature.batchable or max_batch == 1 or _has_independent_rows(model, min(max_batch, _PROBE_ROWS)):
        return signature.batchable
    _log.warning(
        "requests to model '%s' are not merged: its answer to one row changes with the rows beside it in the batch",
        name,
    )
    return False


def _has_independent_rows(model: LoadedModel, rows: int) -> bool:
    """Whether each of ``rows`` rows is answered alike alone and together; True if the model takes none that can be guessed."""
    if any(spec.datatype is DataType.BYTES for spec in model.signature.inputs):
        return True
    random = np.random.default_rng(0)
    inputs = {name: _probe(zeros, random) for name, zeros in _zeros(model.signature, rows).items()}
    try:
        together = model.forward(inputs)
        alone = [model.forward({name: array[row : row + 1] for name, array in inputs.items()}) for row in range(rows)]
    except PenstockError:
        return True  # values out of the model's range
    return all(_is_alike(array, [answer[name] for answer in alone]) for name, array in together.items())


def _probe(zeros: Array, random: np.random.Generator) -> Array:
    if DataType.from_numpy(zeros.dtype).is_float:
        return np.asarray(random.normal(size=zeros.shape), zeros.dtype)
    # Whatever integers stand for, 0 and 1 are most likely among them.
    return np.asarray(random.integers(0, 2, zeros.shape), zeros.dtype)


def _is_alike(together: Array, alone: Sequence[Array]) -> bool:
    if any(array.shape != (1, *together.shape[1:]) for array in alone):
        return False
    separate = np.concatenate(alone)
    if DataType.from_numpy(separate.dtype) is DataType.BYTES:
        return bool((together == separate).all())
    first, second = together.astype(np.float64), separate.astype(np.float64)
    finite = np.abs(second[np.isfinite(second)])
    # Kernels for other batch sizes round differently, those of INT8 most of all.
    return np.allclose(first, second, rtol=0, atol=_TOLERANCE * finite.max(initial=0.0), equal_nan=True)


def _zeros(signature: Signature, batch: int) -> dict[str, Array]:
    inputs: dict[str, Array] = {}
    for spec in signature.inputs:
        shape = [1 if dim == -1 else dim for dim in spec.shape]
        if signature.batchable:
            shape[0] = batch
        inputs[spec.name] = np.full(shape, b"" if spec.datatype is DataType.BYTES else 0, spec.datatype.dtype)
    return inputs
