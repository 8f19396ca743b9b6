"""Answers requests and counts the answers. Each request ends exactly once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.queue import Pending
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.batch_log import BatchLog
from penstock.telemetry.statistics import BatchTimes, Failure, ModelStatistics, ResponseKind
from penstock.telemetry.tracing import Tracer
from penstock.tensor import Array

_log = logging.getLogger(__name__)


class Answers:
    """Answers the requests of one model version. Used only on the event loop. ``now_ns`` is the clock."""

    def __init__(self, statistics: ModelStatistics, now_ns: Callable[[], int], tracer: Tracer | None = None) -> None:
        self._statistics = statistics
        self._log = BatchLog(statistics)
        self._now_ns = now_ns
        self._tracer = tracer
        self._drained = asyncio.Event()

    @property
    def statistics(self) -> ModelStatistics:
        """The statistics, updated with all recorded batches."""
        self._log.digest()
        return self._statistics

    async def drain(self) -> None:
        """Wait until every request has ended."""
        while self._statistics.pending:
            self._drained.clear()
            await self._drained.wait()

    def refused(self, error: PenstockError) -> PenstockError:
        """Count a rejected request, and return ``error``."""
        now_ns = self._now_ns()
        self._statistics.failed(Failure.REJECTED, now_ns, now_ns)
        return error

    def fail(self, pending: Pending, error: PenstockError, failure: Failure) -> None:
        """End ``pending`` with ``error``, unless the request has already ended."""
        if pending.done is not None:
            self._statistics.failed(failure, pending.arrived_ns, self._now_ns())
            self._end(pending, error)

    def give(
        self, batch: Batch, outcome: list[dict[str, Array]] | PenstockError, times: BatchTimes, now_ns: int
    ) -> None:
        """End every request of ``batch`` with its outputs, or with the batch's error."""
        self._record(batch, times)
        if isinstance(outcome, PenstockError):
            for pending in batch.requests:
                self.fail(pending, outcome, Failure.BACKEND)
            return
        statistics, requests = self._statistics, batch.requests
        arrived = [pending.arrived_ns for pending in requests if pending.done is not None]
        if arrived:
            self._log.executed(arrived, batch.rows, batch.reason, times, now_ns)
        for pending, outputs in zip(requests, outcome, strict=True):
            done = pending.done
            if done is not None:  # same as _end(), inlined for speed
                pending.done = None
                statistics.pending -= 1
                try:
                    request = pending.request
                    if request.outputs:
                        done(_response(request, outputs))
                    else:
                        done(InferResponse(request.model_name, request.model_version, outputs, request.id))
                except Exception:  # noqa: BLE001 - see tell()
                    _log.exception("a receiver failed")
        if not statistics.pending:
            self._drained.set()

    def give_one(
        self, pending: Pending, outputs: dict[str, Array], number: int, times: BatchTimes, taken: Callable[[], None]
    ) -> None:
        """Forward an answer of a decoupled model to the request. See ``DynamicBatcher.answer``."""
        taken()
        if pending.done is None:
            return
        now_ns = self._now_ns()
        self._statistics.responded(number, ResponseKind.SUCCESS, times.merged_ns, now_ns, times.ran_ns)
        if not number:
            self._statistics.responded_first(pending.arrived_ns, now_ns)
        answer = _response(pending.request, outputs)
        if isinstance(answer, InferResponse):
            answer.final = False
            tell(pending.done, answer)
        else:
            self.fail(pending, answer, Failure.BACKEND)

    def end_stream(self, batch: Batch, error: PenstockError | None, number: int, times: BatchTimes) -> None:
        """End the only request of ``batch``. The decoupled model has sent ``number`` answers."""
        (pending,) = batch.requests
        self._record(batch, times)
        now_ns = self._now_ns()
        kind = ResponseKind.EMPTY if error is None else ResponseKind.FAIL
        if pending.done is None:
            kind = ResponseKind.CANCEL
        self._statistics.responded(number, kind, times.ran_ns, now_ns)
        if error is not None:
            self.fail(pending, error, Failure.BACKEND)
        elif pending.done is not None:
            self._log.executed([pending.arrived_ns], batch.rows, batch.reason, times, now_ns)
            request = pending.request
            self._end(pending, InferResponse(request.model_name, request.model_version, {}, request.id))

    def _record(self, batch: Batch, times: BatchTimes) -> None:
        tracer = self._tracer
        if tracer is not None and tracer.enabled:
            tracer.computed((pending.request.trace for pending in batch.requests), batch.rows, batch.reason, times)

    def _end(self, pending: Pending, outcome: Outcome) -> None:
        done, pending.done = pending.done, None
        self._statistics.pending -= 1
        if not self._statistics.pending:
            self._drained.set()
        tell(done, outcome)


def tell(done: Done | None, outcome: Outcome) -> None:
    """Call ``done``, unless it is None, and log its exceptions."""
    try:
        if done is not None:
            done(outcome)
    except Exception:  # noqa: BLE001 - a bug in one callback must not affect other requests
        _log.exception("a receiver failed")


def _response(request: InferRequest, outputs: dict[str, Array]) -> Outcome:
    if request.outputs:
        try:
            outputs = {name: outputs[name] for name in request.outputs}
        except KeyError as error:
            return PenstockError(f"the model did not return the output '{error.args[0]}'")
    return InferResponse(request.model_name, request.model_version, outputs, request.id)
