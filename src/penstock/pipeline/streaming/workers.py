"""The threads that run the stages of a pipeline. A caller may also run the stages itself, without any thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Self

from penstock.errors import PenstockError
from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.stage import Batch, Call, Stage, StageSpec, take
from penstock.pipeline.streaming.timeline import Timeline

_log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], object]
"""``post(callback)`` calls ``callback``, now or later, so that no two callbacks run at the same time."""


class Workers:
    """Runs calls of stages on ``threads`` threads between ``start`` and ``stop``; also a context manager.

    Outcomes are delivered through ``post``. ``add`` may be called from any thread.
    """

    def __init__(
        self, specs: Mapping[str, StageSpec], post: Post, threads: int = 0, timeline: Timeline | None = None
    ) -> None:
        self._stages = {name: Stage(spec, depth) for depth, (name, spec) in enumerate(specs.items())}
        self._post = post
        self._timeline = timeline
        self._changed = threading.Condition(threading.Lock())
        self._stopped = False
        self._own = threading.local()
        """``is_free`` is True if the thread ends a batch, and takes a call next: its first new call need not wake another."""
        self._threads = [
            threading.Thread(target=self._work, name=f"penstock-worker-{n}", daemon=True) for n in range(threads)
        ]

    def start(self) -> None:
        """Start the threads. Call once."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, and wait for the calls in progress. Waiting calls are dropped. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
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
            for stage in self._stages.values():
                stage.forget_cancelled()
            return not any(stage.busy or stage.groups for stage in self._stages.values())

    def add(self, stage: str, call: Call) -> None:
        """Let ``call`` wait for a worker."""
        with self._changed:
            self._stages[stage].add(call)
            if getattr(self._own, "is_free", False):
                self._own.is_free = False
            else:
                self._changed.notify()

    def run_ready(self) -> None:
        """Run calls in the calling thread until none is ready."""
        while (batch := self.take()) is not None:
            self._run(batch)

    def take(self) -> Batch | None:
        """The calls to run next, see ``stage.take``. The caller runs them, and then calls ``finish``."""
        with self._changed:
            return take(self._stages.values())

    def finish(self, batch: Batch, outcomes: list[Told]) -> None:
        """Deliver the ``outcomes`` of ``batch``."""
        with self._changed:
            batch.stage.busy -= 1
            if batch.stage.spec.limit:
                self._changed.notify()
        self._post(partial(_deliver, batch.calls, outcomes))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and (batch := take(self._stages.values())) is None:
                    self._changed.wait()
                if self._stopped:
                    return
            assert batch is not None
            self._run(batch)

    def _run(self, batch: Batch) -> None:
        start_ns = time.perf_counter_ns()
        try:
            outcomes = batch.stage.spec.run(batch.inputs)
        except Exception:  # noqa: BLE001 - every call must get an outcome
            _log.exception("step '%s' failed", batch.stage.spec.name)
            outcomes = [PenstockError("internal error")] * len(batch.calls)
        if self._timeline is not None:
            items = (call.item for call in batch.calls)
            self._timeline.add(batch.stage.spec.name, items, threading.current_thread().name, start_ns)
        self._own.is_free = True
        self.finish(batch, outcomes)
        self._own.is_free = False


def _deliver(calls: list[Call], outcomes: list[Told]) -> None:
    for call, outcome in zip(calls, outcomes, strict=True):
        if not call.is_cancelled:
            call.done(outcome)
