"""Runs a ``RequestModel``. Such a model receives requests unmerged and answers each request separately."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from penstock.engines.base import RequestModel
from penstock.errors import PenstockError
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.layout import BatchLayout, MergedRows, SingleRequest
from penstock.online.scheduler.queue import Pending
from penstock.request import InferRequest
from penstock.telemetry.statistics import BatchTimes
from penstock.tensor import Array

_AHEAD = 16
"""Maximum number of answers of a decoupled request that the event loop has not received yet."""

Explain = Callable[[Exception], PenstockError]
_Outcome = dict[str, Array] | PenstockError | None


def run_requests(model: RequestModel, batch: Batch, source: DynamicBatcher, explain: Explain) -> None:
    """Execute ``batch``. A decoupled model may still send answers after this function has returned."""
    answers = _Stream(source, batch) if model.decoupled else _Answers(source, batch)
    failed = None
    try:
        model.execute([_given(source.layout, pending) for pending in batch.requests], answers.answer)
    except Exception as error:  # noqa: BLE001 - a model's bug must not end the thread
        failed = explain(error)
    answers.executed(failed)


class _Answers:
    """Collects one answer to each request of ``batch``."""

    def __init__(self, source: DynamicBatcher, batch: Batch) -> None:
        self._source = source
        self._batch = batch
        self._outcomes: list[_Outcome] = [None] * len(batch.requests)
        self._start_ns = time.monotonic_ns()

    def answer(self, number: int, outcome: _Outcome, _: bool) -> bool:
        if outcome is not None:
            self._outcomes[number] = outcome
        return self._batch.requests[number].done is not None

    def executed(self, failed: PenstockError | None) -> None:
        """Finish the requests that have outputs as one batch, and every failed request separately."""
        now_ns = time.monotonic_ns()
        times = BatchTimes(self._batch.taken_ns, self._start_ns, now_ns, now_ns)
        failed = failed or PenstockError("the model did not answer this request")
        answered: list[Pending] = []
        outputs: list[dict[str, Array]] = []
        for pending, outcome in zip(self._batch.requests, self._outcomes, strict=True):
            found = failed if outcome is None else _shaped(self._source.layout, pending, outcome)
            if isinstance(found, dict):
                answered.append(pending)
                outputs.append(found)
            else:
                self._source.finish(_part(self._batch, [pending]), found, times)
        if answered:
            self._source.finish(_part(self._batch, answered), outputs, times)


class _Stream:
    """Forwards the answers to the only request of ``batch``. Any thread may call ``answer``."""

    def __init__(self, source: DynamicBatcher, batch: Batch) -> None:
        self._source = source
        self._batch = batch
        self._room = threading.Semaphore(_AHEAD)
        self._lock = threading.Lock()
        self._number = 0
        self._start_ns = self._last_ns = time.monotonic_ns()
        self._ended = False

    def answer(self, _: int, outcome: _Outcome, final: bool) -> bool:
        (pending,) = self._batch.requests
        with self._lock:
            if self._ended:
                return False
            outcome = None if outcome is None else _shaped(self._source.layout, pending, outcome)
            if isinstance(outcome, dict) and pending.done is not None:
                self._pass_on(pending, outcome)
            if final or isinstance(outcome, PenstockError):
                self._ended = True
                error = outcome if isinstance(outcome, PenstockError) else None
                now_ns = time.monotonic_ns()
                times = BatchTimes(self._batch.taken_ns, self._start_ns, now_ns, now_ns)
                self._source.finish_stream(self._batch, error, self._number, times)
        return pending.done is not None

    def executed(self, failed: PenstockError | None) -> None:
        if failed is not None:
            self.answer(0, failed, True)

    def _pass_on(self, pending: Pending, outputs: dict[str, Array]) -> None:
        self._room.acquire()
        now_ns = time.monotonic_ns()
        times = BatchTimes(self._batch.taken_ns, self._last_ns, now_ns, now_ns)
        # A closed event loop would never release the semaphore.
        self._ended = not self._source.answer(pending, outputs, self._number, times, self._room.release)
        self._number, self._last_ns = self._number + 1, time.monotonic_ns()


def _given(layout: BatchLayout, pending: Pending) -> InferRequest:
    if isinstance(layout, MergedRows | SingleRequest):
        return pending.request
    return msgspec.structs.replace(pending.request, inputs=dict(layout.gather([pending])))


def _shaped(
    layout: BatchLayout, pending: Pending, outcome: dict[str, Array] | PenstockError
) -> dict[str, Array] | PenstockError:
    """Convert outputs to the clients' shapes. Without a reshape, the outputs may have any number of rows."""
    if isinstance(outcome, PenstockError) or isinstance(layout, MergedRows | SingleRequest):
        return outcome
    try:
        return layout.scatter([pending], outcome)[0]
    except PenstockError as error:
        return error


def _part(batch: Batch, requests: Sequence[Pending]) -> Batch:
    return Batch(list(requests), sum(pending.rows for pending in requests), batch.reason, batch.taken_ns)
