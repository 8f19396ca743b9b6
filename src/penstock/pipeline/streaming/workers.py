"""The threads that run the stages of a pipeline. A caller may also run the stages itself, without any thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from penstock.errors import PenstockError
from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.fairness import Flows
from penstock.pipeline.streaming.memory import Memory
from penstock.pipeline.streaming.stage import Inputs, StageBatch, StageCall, StageQueue, StageSpec, take
from penstock.pipeline.streaming.timeline import Timeline

_log = logging.getLogger(__name__)

_STUCK_S = 10.0
"""A thread is replaced if it still runs a call whose item was cancelled, so long after the call has begun."""
_MOST_SPARE = 64
Post = Callable[[Callable[[], None]], object]
"""``post(callback)`` calls ``callback``, now or later, so that no two callbacks run at the same time."""


class Workers:
    """Runs calls of stages on ``threads`` threads between ``start`` and ``stop``; also a context manager.

    Outcomes are delivered through ``post``. ``add`` may be called from any thread. While ``memory`` is full, only items that have
    been started run, or one item if none in progress ``has_started``. The time of each call is charged to its flow.

    Code of a step may never return. Once its item is cancelled, such as by a deadline, another thread takes the thread's place.
    """

    def __init__(  # noqa: PLR0913 - collaborators, and a clock for tests
        self,
        specs: Mapping[str, StageSpec],
        post: Post,
        memory: Memory,
        flows: Flows,
        has_started: Callable[[], bool],
        threads: int = 0,
        timeline: Timeline | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._checked = now()
        """When threads that are stuck were last looked for."""
        self._stages = {name: StageQueue(spec, depth) for depth, (name, spec) in enumerate(specs.items())}
        self._post = post
        self._memory = memory
        self._flows = flows
        self._has_started = has_started
        self._is_full = False
        """True if the memory was full when a thread last looked."""
        self._timeline = timeline
        self._changed = threading.Condition(threading.Lock())
        self._stopped = False
        self._own = threading.local()
        """``is_free`` is True if the thread ends a batch, and takes a call next: its first new call need not wake another."""
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._running: dict[threading.Thread, tuple[float, StageBatch]] = {}
        """The batch that each busy thread runs, and when it began."""

    def start(self) -> None:
        """Start the threads. Call once."""
        with self._changed:
            for _ in range(self._count):
                self._start_thread()

    def stop(self) -> None:
        """End the threads, and wait for the calls in progress. Waiting calls are dropped. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_empty(self) -> bool:
        """True if no call waits or is in progress."""
        with self._changed:
            return not any(stage.busy or not stage.is_empty for stage in self._stages.values())

    def add(self, stage: str, call: StageCall) -> None:
        """Let ``call`` wait for a worker."""
        with self._changed:
            self._stages[stage].add(call)
            self._replace_stuck()
            if getattr(self._own, "is_free", False):
                self._own.is_free = False
            else:
                self._changed.notify()

    def run_ready(self) -> None:
        """Run calls in the calling thread until none is ready."""
        while (batch := self.take()) is not None:
            self._run(batch)

    def take(self) -> StageBatch | None:
        """The calls to run next, see ``stage.take``. The caller runs them, and then calls ``finish``."""
        with self._changed:
            return self._take()

    def finish(self, batch: StageBatch, outcomes: list[Told]) -> None:
        """Deliver the ``outcomes`` of ``batch``."""
        for outcome in outcomes:
            self._memory.add(outcome)
        with self._changed:
            batch.stage.busy -= 1
            if batch.stage.spec.limit:
                self._changed.notify()
        self._post(partial(_deliver, batch.calls, outcomes))

    def _work(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._changed:
                self._running.pop(thread, None)
                if len(self._threads) > self._count and len(self._threads) > self._count + self._stuck():
                    self._threads.remove(thread)  # the thread that it replaced has returned
                    return
                while not self._stopped and (batch := self._take()) is None:
                    self._changed.wait()
                if self._stopped:
                    return
                assert batch is not None
                self._running[thread] = self._now(), batch
            self._run(batch)
            del batch  # and its inputs, before the memory is looked at

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"penstock-worker-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _stuck(self) -> int:
        """Number of threads to replace."""
        latest = self._now() - _STUCK_S
        return min(
            _MOST_SPARE,
            sum(
                began < latest and all(call.is_cancelled for call in batch.calls)
                for began, batch in self._running.values()
            ),
        )

    def _replace_stuck(self) -> None:
        """Start threads in place of stuck ones, if no other is idle."""
        if not self._running or len(self._running) < len(self._threads) or self._stopped:
            return
        if (now := self._now()) < self._checked + 1:
            return
        self._checked = now
        for _ in range(self._count + self._stuck() - len(self._threads)):
            _log.warning("a step has not returned %g s after it began, although its item was cancelled", _STUCK_S)
            self._start_thread()

    def look_again(self) -> None:
        """Let threads that wait because the memory is full look at it again. Call after items end and results are freed."""
        with self._changed:
            self._replace_stuck()
            if self._is_full:
                self._changed.notify_all()

    def _take(self) -> StageBatch | None:
        self._is_full = self._memory.is_full
        return take(self._stages.values(), self._is_full, self._has_started)

    def _run(self, batch: StageBatch) -> None:
        start_ns = time.perf_counter_ns()
        outcomes = _outcomes(batch.stage.spec, batch.inputs)
        seconds = (time.perf_counter_ns() - start_ns) / 1e9 / max(1, len(batch.calls))
        self._flows.charge([call.item for call in batch.calls], seconds)
        if self._timeline is not None:
            items = (call.item.number for call in batch.calls)
            self._timeline.add(batch.stage.spec.name, items, threading.current_thread().name, start_ns)
        self._own.is_free = True
        self.finish(batch, outcomes)
        self._own.is_free = False


def _outcomes(spec: StageSpec, inputs: Sequence[Inputs]) -> list[Told]:
    """The outcomes of calls that run together. After an unknown error, each runs alone, so that it fails no other call."""
    try:
        return spec.run(inputs)
    except BaseException as error:  # SystemExit, or a panic in Rust, must not end the worker without an outcome
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        if len(inputs) > 1:
            return [outcome for one in inputs for outcome in _outcomes(spec, [one])]
        _log.exception("step '%s' failed", spec.name)
        return [PenstockError("internal error")]


def _deliver(calls: list[StageCall], outcomes: list[Told]) -> None:
    for call, outcome in zip(calls, outcomes, strict=True):
        if not call.is_cancelled:
            call.done(outcome)
