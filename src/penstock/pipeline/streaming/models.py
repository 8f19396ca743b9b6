"""Models as steps of a pipeline: a value of one item has no batch axis, and the tensors of a model have one."""

from __future__ import annotations

import queue
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec
import numpy as np

from penstock.errors import PenstockError
from penstock.pipeline.executor import Told, Work
from penstock.pipeline.function import ModelStep
from penstock.pipeline.value import Value
from penstock.tensor import Array


class ModelCaller(Protocol):
    """A model that runs elsewhere, such as behind the scheduler of a server."""

    def start(self, item: int, inputs: dict[str, Array], done: Callable[[Told], None]) -> Work | None:
        """Start one call for the item with this number. See ``executor.Start``. ``done`` may be called from any thread."""
        ...


Forward = Callable[[Mapping[str, Array]], dict[str, Array]]


class LocalModel(msgspec.Struct, frozen=True, eq=False):
    """A model in this process. ``forward`` is ``LoadedModel.forward``; the workers call it."""

    forward: Forward
    max_batch: int = 1
    """Maximum rows of a call. Must be 1 unless rows are proven to be independent."""
    calls: int = 1
    """Maximum number of calls at a time; 0 means any number. Must be 1 unless the model is reentrant."""
    is_tuned: bool = False
    """True if calls of ``max_batch`` rows were measured to be fast. Otherwise ``max_batch`` is only a limit."""


def guarded(*copies: LocalModel) -> LocalModel:
    """The model of ``copies``, for several threads. A call goes to a copy that has less than ``calls`` calls, or waits for one."""
    if not copies[0].calls:
        return copies[0]
    free: queue.SimpleQueue[Forward] = queue.SimpleQueue()
    for copy in copies:
        for _ in range(copy.calls):
            free.put(copy.forward)

    def forward(inputs: Mapping[str, Array]) -> dict[str, Array]:
        taken = free.get()
        try:
            return taken(inputs)
        finally:
            free.put(taken)

    return msgspec.structs.replace(copies[0], forward=forward, calls=free.qsize())


def shapes_of(step: ModelStep, inputs: Mapping[str, Value]) -> Hashable:
    """Calls of ``step`` can be merged if this is equal: the name, shape and datatype of each tensor."""
    return tuple((name, array.shape, array.dtype) for name, array in sorted(step.to_model(inputs).items()))


def from_rows(step: ModelStep, told: Told) -> Told:
    """The values of one item, from the outcome of a call for it."""
    return told if isinstance(told, PenstockError) else step.from_model(told)


def run_rows(step: ModelStep, model: LocalModel, items: Sequence[Mapping[str, Value]]) -> list[Told]:
    """The outcomes for ``items``, whose ``shapes_of`` are equal, by one call. If the call fails, each item gets its own call, so that
    only the items that the model rejects fail.
    """
    if len(items) > 1:
        rows = [step.to_model(item) for item in items]  # as for ``shapes_of``, so that it raises nothing
        with suppress(PenstockError):
            outputs = model.forward({name: np.concatenate([row[name] for row in rows]) for name in rows[0]})
            return [
                step.from_model({name: array[n : n + 1] for name, array in outputs.items()}) for n in range(len(rows))
            ]
    return [from_rows(step, attempted(lambda item: model.forward(step.to_model(item)), {**item})) for item in items]


def attempted(run: Callable[[dict[str, Value]], dict[str, Value]], inputs: dict[str, Value]) -> Told:
    """The outcome of ``run(inputs)``. An error has no traceback, which would keep the inputs in memory."""
    try:
        return run(inputs)
    except PenstockError as error:
        return error.with_traceback(None)
