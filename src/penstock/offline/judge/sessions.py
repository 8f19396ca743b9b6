"""Models in an engine for as long as they are needed: to answer, to show their signature, to be timed against one another."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.offline.dataset import Dataset
from penstock.offline.judge.accuracy import Outputs, answers
from penstock.perf.measure import Timings, feed, interleave
from penstock.tensor import Array, Signature

_AS_WRITTEN = {"graph_level": "disabled", "arena": False}
_Name = TypeVar("_Name", bound=Hashable)


@contextlib.contextmanager
def loaded(
    artifact: Artifact, threads: int = 1, *, as_written: bool = False, engine: str = "onnxruntime"
) -> Iterator[LoadedModel]:
    """``artifact`` ready to run, unloaded at the end.

    ``as_written``: ONNX Runtime rewrites nothing, so that every tensor is the graph's own, and keeps no memory that a large
    batch took. Raises InvalidModel or EngineUnavailable if it does not load.
    """
    model = get_engine(engine).load(artifact, {"threads": threads, **(_AS_WRITTEN if as_written else {})})
    try:
        yield model
    finally:
        model.unload()


def signature_of(artifact: Artifact) -> Signature:
    """What goes into ``artifact`` and comes out. Raises InvalidModel if ONNX Runtime refuses it."""
    with loaded(artifact, as_written=True) as model:
        return model.signature


def answers_of(
    artifact: Artifact, data: Dataset, threads: int = 1, *, batch_size: int = 64, as_written: bool = False
) -> Outputs:
    """The outputs of ``artifact`` on all of ``data``. Raises as ``answers``."""
    with loaded(artifact, threads, as_written=as_written) as model:
        return answers(model, data, batch_size)


def call_rows(signature: Signature, rows: int) -> int:
    """``rows`` samples in a call, or what a model takes that leaves no choice."""
    return rows if signature.batchable else signature.smallest_batch


def race(
    models: Mapping[_Name, Artifact],
    inputs: Mapping[str, Array],
    budget_s: float,
    threads: int = 1,
    engine: str = "onnxruntime",
) -> dict[_Name, Timings]:
    """Each of ``models`` timed on a call with ``inputs``, interleaved, for about ``budget_s`` seconds after all are loaded."""
    with contextlib.ExitStack() as stack:
        runs = {
            str(number): feed(stack.enter_context(loaded(model, threads, engine=engine)), inputs)
            for number, model in enumerate(models.values())
        }
        timings = interleave(runs, budget_s)
    return {name: timings[str(number)] for number, name in enumerate(models)}
