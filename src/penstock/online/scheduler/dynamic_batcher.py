"""The queue of one model version, emptied in batches by its instances.

Natural batching: nothing is waited for unless a delay is configured. What arrives while all instances are busy leaves together, as
far as it fits, when the next one is free; an idle instance starts at once with what one turn of the event loop brought.

Threads: ``submit``, ``Pending.cancel``, ``drain`` and ``stop`` belong to the event loop, ``take``, ``finish``, ``answer`` and
``finish_stream`` to the instances.
"""

from __future__ import annotations

import asyncio
import logging
import queue as queues
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec

from penstock.errors import Cancelled, DeadlineExceeded, PenstockError, Unavailable
from penstock.online.scheduler.arrival_order import ArrivalOrder
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.forming import Batch, Decision, Rules, form
from penstock.online.scheduler.latency_model import LatencyModel
from penstock.online.scheduler.queue import NEVER, Level, Pending, Queue
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import Answer, BatchTimes, Failure, ModelStatistics
from penstock.tensor import Array

_log = logging.getLogger(__name__)


class DynamicBatcher:
    """See the module. Every request submitted ends exactly once: with a result, an error, or by being cancelled.

    ``now_ns`` is the clock, ``time.monotonic_ns`` but in tests; a request's deadline lies on the same.
    """

    def __init__(
        self,
        config: BatchingConfig,
        loop: asyncio.AbstractEventLoop,
        statistics: ModelStatistics | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.config = config
        self.statistics = ModelStatistics() if statistics is None else statistics
        self.latency = LatencyModel()
        self._now_ns = now_ns
        self._loop = loop
        self._rules = Rules.of(config)
        self._batchable = config.batchable
        self._max_queue = config.max_queue
        self._order = ArrivalOrder() if config.preserve_ordering else None
        self._arrived: list[Pending] = []
        self._submitted = 0
        self._drained = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = NEVER
        self._lock = threading.Lock()
        # The rest is guarded by the lock.
        self._queue = Queue(config.policies)
        self._levels = self._queue.levels
        # The only level, if it needs no looking at: then a request costs nothing for levels and time-outs.
        policy = self._levels[0].policy
        is_plain = len(self._levels) == 1 and not policy.max_queue_size and not policy.default_timeout_microseconds
        self._only_level = self._levels[0] if is_plain else None
        self._idle = 0
        self._stopped = False
        self._watch_ns = NEVER
        """Until when an idle instance waits at most; one of them has a look then."""
        # One token per idle instance that shall look again. Its get() is one futex wait; a Condition would take three locks.
        self._tokens: queues.SimpleQueue[None] = queues.SimpleQueue()

    def submit(self, request: InferRequest, rows: int, key: Hashable, done: Done) -> Pending:
        """Take over ``request``, already checked; ``done`` is called on the event loop, never before this returns.

        Raises at once Unavailable, if the queue is full or stopped, and DeadlineExceeded, if by what waits and what batches take
        the answer would come too late.
        """
        now_ns = self._now_ns()
        if self.statistics.pending >= self._max_queue:
            raise self._refused(Unavailable(f"the queue of model '{request.model_name}' is full", "try again later"))
        if self._stopped:
            raise self._refused(Unavailable(f"model '{request.model_name}' is being unloaded"))
        if not self._batchable:
            rows = 1
        level = self._only_level
        lane = timeout_ns = deadline_ns = 0
        if level is None:
            level, lane, timeout_ns = self._place(request, now_ns)
        if request.deadline is not None:
            deadline_ns = int(request.deadline.at * 1e9)
            self._check_deadline(deadline_ns, rows, lane, now_ns)
        if self._order is not None:
            done = self._order.place(done)
        self.statistics.pending += 1
        level.came += 1
        level.rows_came += rows
        self._submitted += 1
        if not self._arrived:
            self._loop.call_soon(self._flush)
        pending = Pending(self, self._submitted, request, rows, key, done, now_ns, lane, timeout_ns, deadline_ns)
        self._arrived.append(pending)
        return pending

    def cancel(self, pending: Pending) -> None:
        """See ``Pending.cancel``."""
        with self._lock:
            self._queue.remove(pending)
        self._fail(pending, Cancelled("the request was cancelled"), Failure.CANCELED)

    def take(self) -> Batch | None:
        """The next batch; blocks while there is none; None once stopped and empty."""
        watches = False
        while True:
            with self._lock:
                if watches:
                    self._watch_ns = NEVER
                now_ns = self._now_ns()
                expired, decision = self._decide(now_ns)
                batch = decision.batch
                if batch is not None:
                    self._queue.take(batch.requests, batch.rows)
                    if self._queue and self._idle:
                        self._wake()
                elif not self._stopped:
                    self._idle += 1
                    watches = decision.wait_ns < self._watch_ns
                    if watches:
                        self._watch_ns = decision.wait_ns
            if expired or decision.late:
                self._call(self._drop, expired, decision.late)
            if batch is not None or self._stopped:
                return batch
            self._rest((decision.wait_ns - now_ns) / 1e9 if watches else None)

    def finish(self, batch: Batch, outcome: list[dict[str, Array]] | PenstockError, times: BatchTimes) -> None:
        """Give back a batch taken, or a part of it, with the outputs of each request or the error that befell all."""
        self._call(self._complete, batch, outcome, times)

    def answer(
        self, pending: Pending, outputs: dict[str, Array], number: int, times: BatchTimes, taken: Callable[[], None]
    ) -> bool:
        """One answer, not the last, of a decoupled model: its ``number``-th from 0, for which the model worked from ``merged_ns``
        to ``ran_ns``. ``taken`` is called once it has been passed on. False if nobody will, for the event loop is closed."""
        return self._call(self._answer, pending, outputs, number, times, taken)

    def finish_stream(self, batch: Batch, error: PenstockError | None, number: int, times: BatchTimes) -> None:
        """The end of a decoupled model's ``number`` answers to the one request of ``batch``."""
        self._call(self._complete_stream, batch, error, number, times)

    async def drain(self) -> None:
        """Return when every request submitted has been answered."""
        while self.statistics.pending:
            self._drained.clear()
            await self._drained.wait()

    def stop(self) -> None:
        """Take no more requests; instances leave when the queue is empty."""
        self._flush()
        with self._lock:
            self._stopped = True
            self._rules = Rules.of(msgspec.structs.replace(self.config, max_queue_delay_microseconds=0))
            while self._idle:
                self._wake()

    def _place(self, request: InferRequest, now_ns: int) -> tuple[Level, int, int]:
        """Level, lane and end of the time-out (0: none) by the request's priority. Raises Unavailable if its level is full."""
        number = request.priority
        if not 1 <= number <= self.config.priority_levels:
            number = self.config.default_priority_level or 1
        level = self._levels[number - 1]
        policy = level.policy
        if policy.max_queue_size and level.waiting >= policy.max_queue_size:
            raise self._refused(Unavailable("Exceeds maximum queue size", "try again later"))
        timeout_ns = policy.timeout_ns(request.timeout_us)
        return level, 2 * (number - 1), now_ns + timeout_ns if timeout_ns else 0

    def _check_deadline(self, deadline_ns: int, rows: int, lane: int, now_ns: int) -> None:
        """Raise DeadlineExceeded if what waits before it and its own batch are expected to take longer than there is time."""
        if deadline_ns <= now_ns:
            raise self._refused(DeadlineExceeded("the request's deadline has passed"))
        if self.config.decoupled:
            return  # the first answers come long before the last, and nobody knows how many are of use
        max_rows = self._rules.max_rows
        full, over = divmod(sum(level.rows for level in self._levels[: (lane >> 1) + 1]), max_rows)
        took_ns = self.latency.mean(max(rows, min(over + rows, max_rows)), now_ns)
        took_ns += full * self.latency.mean(max_rows, now_ns) // self.config.instances
        if took_ns > deadline_ns - now_ns:
            left_ms, took_ms = (deadline_ns - now_ns) / 1e6, took_ns / 1e6
            message = f"the answer is expected in {took_ms:.1f} ms, and the deadline is in {left_ms:.1f} ms"
            raise self._refused(DeadlineExceeded(message, "give it longer, or try again later"))

    def _refused(self, error: PenstockError) -> PenstockError:
        now_ns = self._now_ns()
        self.statistics.failed(Failure.REJECTED, now_ns, now_ns)
        return error

    def _flush(self) -> None:
        """Hand over what one turn of the loop brought: one lock and at most one wake-up for all of it."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        with self._lock:
            self._queue.extend(arrived)
            if self._idle and self._is_due():
                self._wake()
            next_ns = self._queue.next_ns
        if next_ns < self._timer_ns:
            self._set_timer(next_ns)

    def _is_due(self) -> bool:
        """Whether an idle instance has to look: not while all are held back, and one looks soon enough by itself."""
        if not self._rules.delay_ns:
            return True
        decision = form(self._queue.lines(), self._now_ns(), self._rules)
        return decision.batch is not None or decision.wait_ns < self._watch_ns

    def _decide(self, now_ns: int) -> tuple[list[Pending], Decision]:
        """Whose time is over, and what to do with the rest."""
        queue = self._queue
        expired = queue.expire(now_ns) if queue.next_ns <= now_ns else []
        if not queue:
            return expired, Decision(None)
        predicts = queue.next_ns < NEVER and not self.config.decoupled
        decision = form(queue.lines(), now_ns, self._rules, self.latency if predicts else None)
        for pending in decision.late:
            queue.remove(pending)
        return expired, decision

    def _wake(self) -> None:
        self._idle -= 1
        self._tokens.put(None)

    def _rest(self, timeout_s: float | None) -> None:
        """Wait until there is something to look at, or for so long."""
        try:
            self._tokens.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queues.Empty:
            with self._lock:
                try:
                    self._tokens.get_nowait()  # woken at the very end
                except queues.Empty:
                    self._idle -= 1

    def _set_timer(self, at_ns: int) -> None:
        """Have ``_on_timer`` called at ``at_ns`` or within two milliseconds after it; loops count in whole ones."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = at_ns
        self._timer = self._loop.call_later(max(0, at_ns - self._now_ns()) // 1_000_000 / 1e3 + 1e-3, self._on_timer)

    def _on_timer(self) -> None:
        """End those whose time is over, also while no instance ever becomes free."""
        self._timer, self._timer_ns = None, NEVER
        with self._lock:
            expired = self._queue.expire(self._now_ns())
            next_ns = self._queue.next_ns
        if next_ns < NEVER:
            self._set_timer(next_ns)
        self._drop(expired, ())

    def _call(self, callback: Callable[..., None], *args: Any) -> bool:
        """Have ``callback`` called on the event loop; False if that is closed: the server was ended without waiting for this."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True

    def _drop(self, expired: Sequence[Pending], late: Sequence[Pending]) -> None:
        for pending in expired:
            error: PenstockError = Unavailable(
                "Request timeout expired", "it waited as long as the model's queue allows"
            )
            if pending.expires_ns == pending.deadline_ns:
                error = DeadlineExceeded("the request's deadline passed while it waited")
            self._fail(pending, error, Failure.REJECTED)
        for pending in late:
            error = DeadlineExceeded("the answer would have come after the request's deadline", "give it longer")
            self._fail(pending, error, Failure.REJECTED)

    def _fail(self, pending: Pending, error: PenstockError, failure: Failure) -> None:
        if pending.done is not None:
            self.statistics.failed(failure, pending.arrived_ns, self._now_ns())
            self._end(pending, error)

    def _end(self, pending: Pending, outcome: Outcome) -> None:
        """Give the last answer."""
        done, pending.done = pending.done, None
        self.statistics.pending -= 1
        if not self.statistics.pending:
            self._drained.set()
        if done is not None:
            _tell(done, outcome)

    def _complete(self, batch: Batch, outcome: list[dict[str, Array]] | PenstockError, times: BatchTimes) -> None:
        if isinstance(outcome, PenstockError):
            for pending in batch.requests:
                self._fail(pending, outcome, Failure.BACKEND)
            return
        now_ns = self._now_ns()
        self.latency.observe(batch.rows, now_ns - batch.taken_ns, now_ns)
        arrived = [pending.arrived_ns for pending in batch.requests if pending.done is not None]
        if arrived:
            self.statistics.executed(arrived, batch.rows, batch.reason, times, now_ns)
        for pending, outputs in zip(batch.requests, outcome, strict=True):
            if pending.done is not None:
                self._end(pending, _response(pending.request, outputs))

    def _answer(
        self, pending: Pending, outputs: dict[str, Array], number: int, times: BatchTimes, taken: Callable[[], None]
    ) -> None:
        taken()
        if pending.done is None:
            return
        now_ns = self._now_ns()
        self.statistics.responded(number, Answer.SUCCESS, times.merged_ns, now_ns, times.ran_ns)
        if not number:
            self.statistics.responded_first(pending.arrived_ns, now_ns)
        answer = _response(pending.request, outputs)
        if isinstance(answer, InferResponse):
            answer.final = False
            _tell(pending.done, answer)
        else:
            self._fail(pending, answer, Failure.BACKEND)

    def _complete_stream(self, batch: Batch, error: PenstockError | None, number: int, times: BatchTimes) -> None:
        (pending,) = batch.requests
        now_ns = self._now_ns()
        kind = Answer.CANCEL if pending.done is None else Answer.FAIL if error is not None else Answer.EMPTY
        self.statistics.responded(number, kind, times.ran_ns, now_ns)
        if error is not None:
            self._fail(pending, error, Failure.BACKEND)
        elif pending.done is not None:
            self.statistics.executed([pending.arrived_ns], batch.rows, batch.reason, times, now_ns)
            request = pending.request
            self._end(pending, InferResponse(request.model_name, request.model_version, {}, request.id))


def _tell(done: Done, outcome: Outcome) -> None:
    try:
        done(outcome)
    except Exception:  # noqa: BLE001 - a receiver's bug must not keep the others' answers from them
        _log.exception("a receiver failed")


def _response(request: InferRequest, outputs: dict[str, Array]) -> Outcome:
    if request.outputs:
        try:
            outputs = {name: outputs[name] for name in request.outputs}
        except KeyError as error:
            return PenstockError(f"the model gave no output '{error.args[0]}'")
    return InferResponse(request.model_name, request.model_version, outputs, request.id)
