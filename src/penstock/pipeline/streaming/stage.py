"""A stage: one step of a pipeline with the queue of its calls. ``take`` decides which call a free worker runs next.

All stages share the cores. ``take`` prefers the flow that has received the least work, and of a flow the oldest item, so each stage
receives the share of the cores that its cost requires, and the items of a flow leave in about the order in which they came. Queues are
bounded, because the number of items in progress is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple

import msgspec

from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.fairness import FairQueue, Item
from penstock.pipeline.value import Value

Inputs = dict[str, Value]


def one_group(inputs: Inputs) -> Hashable:
    """The group of all calls, if any calls may run together."""
    return None


class StageSpec(msgspec.Struct, frozen=True, eq=False):
    """What a stage runs, and how many calls at once."""

    name: str
    """Path of the step in the pipeline, such as ``lines/recognizer``."""
    run: Callable[[Sequence[Inputs]], list[Told]]
    """The outcomes of several calls of one group, in order. Does not raise."""
    group: Callable[[Inputs], Hashable] = one_group
    """Calls run together only if their groups are equal."""
    max_batch: int = 1
    """Maximum number of calls that run together."""
    waits: bool = False
    """True if full batches are worth waiting for: a smaller batch runs only when no other call is ready."""
    size: Callable[[], int] | None = None
    """The size of full batches at present, at most ``max_batch``; None: always ``max_batch``."""
    limit: int = 0
    """Maximum number of batches at a time; 0 means no limit."""
    movable: object = None
    """The step, if it holds the interpreter's lock and may run in another process."""


class StageCall(msgspec.Struct, eq=False):
    """A call of a step for one item. ``done`` receives the outcome, unless the call is cancelled first."""

    item: Item
    inputs: Inputs
    done: Callable[[Told], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Release the inputs, and leave out the call if it has not been taken."""
        self.is_cancelled = True
        self.inputs = {}


class StageQueue:
    """The waiting calls of a step, by group. Not thread-safe."""

    def __init__(self, spec: StageSpec, depth: int) -> None:
        self.spec = spec
        self.depth = depth
        """Later stages have greater depths."""
        self.busy = 0
        """Number of batches in progress."""
        self.groups: dict[Hashable, FairQueue[StageCall]] = defaultdict(FairQueue)

    def add(self, call: StageCall) -> None:
        """Append ``call`` to the queue of its group."""
        self.groups[self.spec.group(call.inputs)].add(call)

    @property
    def size(self) -> int:
        """The size of full batches."""
        return self.spec.max_batch if self.spec.size is None else self.spec.size()

    @property
    def is_empty(self) -> bool:
        """True if no call waits that is not cancelled."""
        return all(queue.first() is None for queue in self.groups.values())


class StageBatch(NamedTuple):
    """Calls that a worker runs together. ``StageQueue.busy`` counts the batch until it ends."""

    stage: StageQueue
    calls: list[StageCall]
    inputs: list[Inputs]


def take(
    stages: Collection[StageQueue], is_full: bool = False, has_started: Callable[[], bool] = lambda: False
) -> StageBatch | None:
    """Remove the calls that should run next from their queue; None if no stage can start one.

    Full batches and calls that need not wait come first, and among these the item with the lowest rank, then the later stage. If the
    memory ``is_full``, only items that have been started run, or one item if none ``has_started``.
    """
    only_started = is_full and has_started()
    while (best := _best(stages, only_started)) is not None:
        stage, group, first = best
        queue, batch, size = stage.groups[group], StageBatch(stage, [], []), stage.size
        next_call: StageCall | None = first
        while next_call is not None:
            queue.remove(next_call)
            inputs = next_call.inputs  # read first: another thread may cancel the call now, which empties the inputs
            if not next_call.is_cancelled:
                next_call.item.start()
                batch.calls.append(next_call)
                batch.inputs.append(inputs)
            next_call = queue.first(is_full) if len(batch.calls) < size else None
        if not queue:
            del stage.groups[group]
        if batch.calls:
            stage.busy += 1
            return batch
    return None


def _best(stages: Collection[StageQueue], only_started: bool) -> tuple[StageQueue, Hashable, StageCall] | None:
    """The stage and the group of the calls that should run next, and the first of them."""
    best: tuple[tuple[bool, tuple[float, int], int], StageQueue, Hashable, StageCall] | None = None
    for stage in stages:
        if not stage.groups or (stage.spec.limit and stage.busy >= stage.spec.limit):
            continue
        for group, queue in list(stage.groups.items()):
            if (call := queue.first(only_started)) is None:
                if not queue:
                    del stage.groups[group]
                continue
            is_partial = stage.spec.waits and len(queue) < stage.size
            rank = is_partial, call.item.rank, -stage.depth
            if best is None or rank < best[0]:
                best = rank, stage, group, call
    return None if best is None else best[1:]
