"""Items in progress of one function, and the workers that run their steps.

Every item is a ``PipelineRun``. A step that is ready waits in the queue of its stage until a worker takes it::

    items ──▶ PipelineRun ── ready steps ──▶ stages ── take ──▶ workers
                   ▲                                               │
                   └────────────── outcomes, one at a time ────────┘

A ``map`` step is a run of its inner pipeline for each element. The elements' model calls meet in one queue and are batched, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Self

import msgspec

from penstock.errors import Cancelled, PenstockError, prefixed
from penstock.pipeline.executor import PipelineRun, Told, Work
from penstock.pipeline.graph import PipelineStep
from penstock.pipeline.streaming.apart import Movable, Processes
from penstock.pipeline.streaming.binding import Bound, BoundFunction
from penstock.pipeline.streaming.fairness import Flow, Flows, Item
from penstock.pipeline.streaming.memory import Memory, default_limit
from penstock.pipeline.streaming.models import from_rows
from penstock.pipeline.streaming.stage import Inputs, StageCall, StageSpec
from penstock.pipeline.streaming.timeline import Timeline
from penstock.pipeline.streaming.workers import Workers
from penstock.pipeline.value import Value
from penstock.resources import usable_memory

_WINDOW = 256
"""Elements of a ``map`` that are in progress at a time: enough for full batches, and few enough for lists of a million elements."""


class Line:
    """Items in progress, and the workers that run their steps; also a context manager. Any thread may call its methods."""

    def __init__(
        self, bound: Bound, threads: int = 0, timeline: Timeline | None = None, max_bytes: int | None = None
    ) -> None:
        """While results of steps take more than ``max_bytes`` of memory, no further item is started. See ``default_limit``."""
        self._bound = bound
        self._timeline = timeline
        self._told = threading.Condition(threading.RLock())
        """Guards all runs."""
        self._has_threads = threads > 0
        self._processes = Processes(threads)
        self._runs: dict[int, tuple[PipelineRun, Item]] = {}
        self.flows = Flows()
        """Items may belong to flows. The caller enters and leaves them."""
        self._own = Flow(self.flows)
        self._memory = Memory(default_limit(usable_memory()) if max_bytes is None else max_bytes)
        self.workers = Workers(
            self._moved(bound.stages) if threads > 1 else bound.stages,
            self._locked,
            self._memory,
            self.flows,
            self._has_started,
            threads,
            timeline,
        )
        self._turns = 0
        """Number of callbacks that ``_locked`` has run."""

    def start(self) -> None:
        """Start the threads. Call once."""
        self.workers.start()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # such as an interrupt
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_empty(self) -> bool:
        """True if no item is in progress and no call waits."""
        return not self._runs and self.workers.is_empty

    def begin(
        self, item: Item | int, inputs: Mapping[str, Value], done: Callable[[Told], None], outputs: Sequence[str] = ()
    ) -> None:
        """Start ``item``, or the item with this number. ``done`` is called once, with the outputs or an error.

        ``outputs`` are the wanted outputs; by default all that are bound. Steps that they do not need do not run.
        """
        one = Item(item, self._own) if isinstance(item, int) else item
        self._locked(partial(self._begin, one, inputs, done, outputs))

    def cancel(self, number: int) -> None:
        """End item ``number`` with Cancelled, unless it has ended."""
        self._locked(partial(self._cancel, number))

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Return when ``is_over()``. Without threads, the calling thread runs the steps."""
        while True:
            seen = self._turns
            if not self._has_threads:
                self.workers.run_ready()
            with self._told:
                if is_over():
                    return
                if self._turns == seen:
                    self._told.wait()

    def close(self) -> None:
        """Cancel all items, end the threads, and wait for the steps in progress. Idempotent."""
        with self._told:
            for run, _ in list(self._runs.values()):
                run.cancel()
        self.workers.stop()
        self._processes.close()

    def _has_started(self) -> bool:
        """True if an item in progress has been started. Called by any thread, without the lock."""
        return any(item.is_started for _, item in list(self._runs.values()))

    def _moved(self, stages: Mapping[str, StageSpec]) -> dict[str, StageSpec]:
        """``stages``, in which movable steps run where they are faster."""
        return {
            name: msgspec.structs.replace(spec, run=Movable(spec.movable, spec.run, self._processes))
            if spec.movable is not None
            else spec
            for name, spec in stages.items()
        }

    def _locked(self, callback: Callable[[], None]) -> None:
        with self._told:
            callback()
            self._turns += 1
            self._told.notify_all()
        self.workers.look_again()

    def _begin(
        self, item: Item, inputs: Mapping[str, Value], done: Callable[[Told], None], outputs: Sequence[str]
    ) -> None:
        def ended(told: Told) -> None:
            self._runs.pop(item.number, None)
            self._memory.forget(told)
            done(told)

        scope = self._bound.scope
        plan = scope.graph.plan(outputs) if outputs else scope.plan
        run = PipelineRun(plan, partial(self._start, scope, item), ended)
        self._runs[item.number] = run, item
        run.begin(inputs)

    def _cancel(self, number: int) -> None:
        if found := self._runs.get(number):
            found[0].cancel()

    def _start(
        self, scope: BoundFunction, item: Item, step: PipelineStep, inputs: Inputs, done: Callable[[Told], None]
    ) -> Work | None:
        part = scope.parts[step.name]
        if isinstance(part, str):
            self.workers.add(part, call := StageCall(item, inputs, done))
            return call
        if isinstance(part, BoundFunction):
            return _Map(partial(self._start, part, item), part, done).begin(inputs)
        start_ns = time.perf_counter_ns()

        def answered(told: Told) -> None:
            if self._timeline is not None:
                self._timeline.add(part.path, (item.number,), part.step.model, start_ns)
            self._memory.add(told)
            self._locked(partial(done, from_rows(part.step, told)))

        return part.caller.start(item.number, part.step.to_model(inputs), answered)


class _Map:
    """A ``map`` step of one item: a run of the inner function for each element, of which at most ``_WINDOW`` are in progress."""

    def __init__(self, start: Callable[..., Work | None], scope: BoundFunction, done: Callable[[Told], None]) -> None:
        self._start = start
        self._scope = scope
        self._done: Callable[[Told], None] | None = done
        self._inputs: Inputs = {}
        self._elements: Iterator[tuple[int, Value]] = iter(())
        self._runs: dict[int, PipelineRun] = {}
        self._results: dict[str, list[Value]] = {}
        self._missing = 0
        self._is_filling = False

    def begin(self, inputs: Inputs) -> Work | None:
        """Start the first elements. Returns None if the step has ended."""
        elements = inputs[self._scope.over]
        self._missing, self._inputs, self._elements = len(elements), inputs, enumerate(elements)
        self._results = {name: [None] * len(elements) for name in self._scope.plan.wanted}
        if elements:
            self._fill()
        else:
            self._finish(self._results)
        return None if self._done is None else self

    def cancel(self) -> None:
        """Cancel all elements."""
        self._done, self._inputs, self._elements, self._results = None, {}, iter(()), {}
        for run in list(self._runs.values()):
            run.cancel()
        self._runs.clear()

    def _fill(self) -> None:
        """Start further elements. A loop replaces recursion, because elements may end at once."""
        if self._is_filling:
            return
        self._is_filling = True
        while self._done is not None and len(self._runs) < _WINDOW and (following := next(self._elements, None)):
            number, element = following
            run = self._runs[number] = PipelineRun(self._scope.plan, self._start, partial(self._answered, number))
            run.begin({**self._inputs, self._scope.each: element})
        self._is_filling = False

    def _answered(self, number: int, told: Told) -> None:
        if self._done is None:
            return
        self._runs.pop(number, None)
        if isinstance(told, PenstockError):
            done = self._done
            self.cancel()
            done(told if isinstance(told, Cancelled) else prefixed(f"element {number}: ", told))
            return
        for name, results in self._results.items():
            results[number] = told[name]
        self._missing -= 1
        if self._missing:
            self._fill()
        else:
            self._finish(self._results)

    def _finish(self, told: Told) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(told)
