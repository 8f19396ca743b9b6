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
from itertools import islice
from typing import Any

import msgspec

from penstock.errors import Cancelled, DeadlineExceeded, PenstockError, Unavailable
from penstock.online.scheduler.arrival_order import ArrivalOrder
from penstock.online.scheduler.batching_config import BatchingConfig, QueuePolicy
from penstock.online.scheduler.brief_runs import BriefRuns
from penstock.online.scheduler.forming import Batch, Rules, Wait, form
from penstock.online.scheduler.latency_model import LatencyModel
from penstock.online.scheduler.queue import NEVER, Pending, Queue
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.batch_log import BatchLog
from penstock.telemetry.statistics import Answer, BatchTimes, Failure, ModelStatistics
from penstock.telemetry.tracing import Tracer
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
        tracer: Tracer | None = None,
    ) -> None:
        self.config = config
        self._statistics = ModelStatistics() if statistics is None else statistics
        self._log = BatchLog(self._statistics)
        self.latency = LatencyModel()
        self._now_ns = now_ns
        self._tracer = tracer
        self._loop = loop
        self._rules = Rules.of(config)
        self._batchable = config.batchable
        self._max_queue = config.max_queue
        self._order = ArrivalOrder() if config.preserve_ordering else None
        # Whether requests need no looking at but for their deadlines: then levels, time-outs and order cost nothing.
        self._is_plain = config.policies == [QueuePolicy()] and not config.preserve_ordering
        self._arrived: list[Pending] = []
        self._seen = (0, 0)
        """How many of those arrived have been counted, and their rows."""
        self._submitted = 0
        self._predicts = False
        """Whether there are deadlines; without, nothing is measured for them."""
        self._brief = BriefRuns()
        self._run_here: Callable[[Batch], None] | None = None
        self._is_running_here = False
        self._runners = 0
        """Instances whose model may run here."""
        self._drained = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = NEVER
        self._lock = threading.Lock()
        # The rest is guarded by the lock.
        self._queue = Queue(config.policies)
        self._levels = self._queue.levels
        self._idle = 0
        self._stopped = False
        self._watch_ns = NEVER
        """Until when an idle instance waits at most; one of them has a look then."""
        # One token per idle instance that shall look again. Its get() is one futex wait; a Condition would take three locks.
        # Where nothing waits, what has arrived goes that way too, and spares the instance the lock and the queue.
        self._tokens: queues.SimpleQueue[Batch | None] = queues.SimpleQueue()

    @property
    def statistics(self) -> ModelStatistics:
        """Of all that has happened so far."""
        self._log.digest()
        return self._statistics

    def may_run_here(self, run: Callable[[Batch], None]) -> None:
        """``run`` computes a batch and gives it back, as one instance's thread does, but may be called on the event loop while that
        thread rests: it waits for nothing. For each instance once, before the first request."""
        self._run_here = run
        self._runners += 1

    def submit(self, request: InferRequest, rows: int, key: Hashable, done: Done) -> Pending:
        """Take over ``request``, already checked; ``done`` is called on the event loop, never before this returns.

        Raises at once Unavailable, if the queue is full or stopped, and DeadlineExceeded, if by what waits and what batches take
        the answer would come too late.
        """
        statistics = self._statistics
        if statistics.pending >= self._max_queue or self._stopped:
            raise self._turned_away(request)
        self._submitted = number = self._submitted + 1
        pending = Pending(self, number, request, rows if self._batchable else 1, key, done, self._now_ns())
        if not self._is_plain or request.deadline is not None:
            self._admit(pending, done)
        statistics.pending += 1
        if not self._arrived:
            self._loop.call_soon(self._flush)
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
                expired, formed = self._decide(now_ns)
                if isinstance(formed, Batch):
                    self._queue.take(formed.requests, formed.rows)
                    if self._idle and self._queue:
                        self._wake()
                elif not self._stopped:
                    self._idle += 1
                    watches = formed.until_ns < self._watch_ns
                    if watches:
                        self._watch_ns = formed.until_ns
                stopped = self._stopped
            if expired or formed.late:
                self._call(self._drop, expired, formed.late)
            if isinstance(formed, Batch):
                return formed
            if stopped:
                return None
            batch = self._rest((formed.until_ns - now_ns) / 1e9 if watches else None)
            if batch is not None:
                batch.taken_ns = self._now_ns()
                return batch

    def finish(self, batch: Batch, outcome: list[dict[str, Array]] | PenstockError, times: BatchTimes) -> None:
        """Give back a batch taken, or a part of it, with the outputs of each request or the error that befell all."""
        if self._is_running_here:
            self._complete(batch, outcome, times)
        else:
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
        while self._statistics.pending:
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

    def _turned_away(self, request: InferRequest) -> PenstockError:
        if self._stopped:
            return self._refused(Unavailable(f"model '{request.model_name}' is being unloaded"))
        return self._refused(Unavailable(f"the queue of model '{request.model_name}' is full", "try again later"))

    def _admit(self, pending: Pending, done: Done) -> None:
        """Find the request's level, time-out and deadline, and its place in the order. Raises Unavailable and DeadlineExceeded."""
        request, now_ns = pending.request, pending.arrived_ns
        number = request.priority
        if not 1 <= number <= self.config.priority_levels:
            number = self.config.default_priority_level or 1
        level = self._levels[number - 1]
        pending.lane = 2 * (number - 1)
        policy = level.policy
        if policy.max_queue_size and level.waiting >= policy.max_queue_size:
            raise self._refused(Unavailable("Exceeds maximum queue size", "try again later"))
        if request.deadline is not None:
            pending.deadline_ns = int(min(request.deadline.at * 1e9, NEVER))
            self._check_deadline(pending)
        timeout_ns = policy.timeout_ns(request.timeout_us)
        if timeout_ns:
            pending.timeout_ns = now_ns + timeout_ns
        pending.expires_ns = min(pending.timeout_ns, pending.deadline_ns)
        level.came += 1
        if self._order is not None:
            pending.done = self._order.place(done)

    def _check_deadline(self, pending: Pending) -> None:
        """Raise DeadlineExceeded if what waits before it and its own batch are expected to take longer than there is time."""
        now_ns, rows, latency = pending.arrived_ns, pending.rows, self.latency
        left_ns = pending.deadline_ns - now_ns
        if left_ns <= 0:
            raise self._refused(DeadlineExceeded("the request's deadline has passed"))
        if self.config.decoupled:
            return  # the first answers come long before the last, and nobody knows how many are of use
        self._predicts = True
        max_rows = self._rules.max_rows
        ahead = sum(level.rows for level in self._levels[: (pending.lane >> 1) + 1]) + self._arriving_rows()
        full, over = divmod(ahead, max_rows)
        took_ns = latency.mean(max(rows, min(over + rows, max_rows)), now_ns)
        took_ns += full * latency.mean(max_rows, now_ns) // max(1, self.config.instances)
        if took_ns > left_ns:
            message = f"the answer is expected in {took_ns / 1e6:.1f} ms, and the deadline is in {left_ns / 1e6:.1f} ms"
            raise self._refused(DeadlineExceeded(message, "give it longer, or try again later"))

    def _arriving_rows(self) -> int:
        """Rows that this turn of the loop has brought; each request is looked at once."""
        seen, rows = self._seen
        if seen < len(self._arrived):
            rows += sum(pending.rows for pending in islice(self._arrived, seen, None))
            self._seen = len(self._arrived), rows
        return rows

    def _refused(self, error: PenstockError) -> PenstockError:
        now_ns = self._now_ns()
        self._statistics.failed(Failure.REJECTED, now_ns, now_ns)
        return error

    def _flush(self) -> None:
        """Hand over what one turn of the loop brought: one lock and at most one wake-up for all of it."""
        arrived = self._arrived
        if not arrived:
            return
        self._arrived = []
        self._seen = (0, 0)
        here = False
        with self._lock:
            batch = self._at_once(arrived) if self._idle and self._is_plain else None
            if batch is None:
                self._queue.extend(arrived)
                if self._idle and self._is_due():
                    self._wake()
            else:
                here = self._idle == self._runners and self._brief.allow(arrived[0].key, batch.rows)
                if not here:
                    self._wake(batch)
            next_ns = self._queue.next_ns
        if here and batch is not None:
            self._compute_here(batch)
        elif next_ns < self._timer_ns:
            self._set_timer(next_ns)

    def _at_once(self, arrived: list[Pending]) -> Batch | None:
        """All that ``arrived`` as one batch for an idle instance, if it can be one and nobody is passed over."""
        if self._queue or not self._rules.natural:
            return None
        key = arrived[0].key
        for pending in arrived:
            if pending.done is None or pending.key != key:
                return None
        batch = form((arrived,), self._now_ns(), self._rules, self.latency if self._predicts else None)
        if isinstance(batch, Batch) and len(batch.requests) == len(arrived) and not batch.late:
            return batch
        return None

    def _compute_here(self, batch: Batch) -> None:
        """All instances rest, and nothing but this loop wakes one."""
        assert self._run_here is not None
        self._is_running_here = True
        try:
            self._run_here(batch)
        finally:
            self._is_running_here = False

    def _is_due(self) -> bool:
        """Whether an idle instance has to look: not while all are held back, and one looks soon enough by itself."""
        if not self._rules.delay_ns:
            return True
        formed = self._form(self._now_ns())
        return isinstance(formed, Batch) or bool(formed.late) or formed.until_ns < self._watch_ns

    def _decide(self, now_ns: int) -> tuple[Sequence[Pending], Batch | Wait]:
        """Whose time is over, and what to do with the rest."""
        expired = self._queue.expire(now_ns) if self._queue.next_ns <= now_ns else ()
        formed = self._form(now_ns)
        for pending in formed.late:
            self._queue.remove(pending)
        return expired, formed

    def _form(self, now_ns: int) -> Batch | Wait:
        predicts = self._predicts and self._queue.next_ns < NEVER
        return form(self._queue.lines(), now_ns, self._rules, self.latency if predicts else None)

    def _wake(self, batch: Batch | None = None) -> None:
        self._idle -= 1
        self._tokens.put(batch)

    def _rest(self, timeout_s: float | None) -> Batch | None:
        """Wait for a batch, or until there is something to look at, or for so long."""
        if timeout_s is None:
            return self._tokens.get()
        try:
            return self._tokens.get(timeout=max(0.0, timeout_s))
        except queues.Empty:
            with self._lock:
                try:
                    return self._tokens.get_nowait()  # woken at the very end
                except queues.Empty:
                    self._idle -= 1
        return None

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
            self._statistics.failed(failure, pending.arrived_ns, self._now_ns())
            self._end(pending, error)

    def _end(self, pending: Pending, outcome: Outcome) -> None:
        """Give the last answer."""
        done, pending.done = pending.done, None
        self._statistics.pending -= 1
        if not self._statistics.pending:
            self._drained.set()
        if done is not None:
            _tell(done, outcome)

    def _complete(self, batch: Batch, outcome: list[dict[str, Array]] | PenstockError, times: BatchTimes) -> None:
        if self._tracer is not None and self._tracer.enabled:
            self._record(self._tracer, batch, times)
        if isinstance(outcome, PenstockError):
            for pending in batch.requests:
                self._fail(pending, outcome, Failure.BACKEND)
            self._brief.failed()
            return
        now_ns, statistics, requests = self._now_ns(), self._statistics, batch.requests
        if self._predicts:
            self.latency.observe(batch.rows, now_ns - batch.taken_ns, now_ns)
        if self._runners:
            self._brief.observe(requests[0].key, batch.rows, times.split_ns - times.taken_ns)
        arrived = [pending.arrived_ns for pending in requests if pending.done is not None]
        if arrived:
            self._log.executed(arrived, batch.rows, batch.reason, times, now_ns)
        for pending, outputs in zip(requests, outcome, strict=True):
            done = pending.done
            if done is not None:  # as _end, without its calls: this is the hot path
                pending.done = None
                statistics.pending -= 1
                try:
                    request = pending.request
                    if request.outputs:
                        done(_chosen(request, outputs))
                    else:
                        done(InferResponse(request.model_name, request.model_version, outputs, request.id))
                except Exception:  # noqa: BLE001 - as in _tell
                    _log.exception("a receiver failed")
        if not statistics.pending:
            self._drained.set()

    def _record(self, tracer: Tracer, batch: Batch, times: BatchTimes) -> None:
        tracer.computed((pending.request.trace for pending in batch.requests), batch.rows, batch.reason, times)

    def _answer(
        self, pending: Pending, outputs: dict[str, Array], number: int, times: BatchTimes, taken: Callable[[], None]
    ) -> None:
        taken()
        if pending.done is None:
            return
        now_ns = self._now_ns()
        self._statistics.responded(number, Answer.SUCCESS, times.merged_ns, now_ns, times.ran_ns)
        if not number:
            self._statistics.responded_first(pending.arrived_ns, now_ns)
        answer = _response(pending.request, outputs)
        if isinstance(answer, InferResponse):
            answer.final = False
            _tell(pending.done, answer)
        else:
            self._fail(pending, answer, Failure.BACKEND)

    def _complete_stream(self, batch: Batch, error: PenstockError | None, number: int, times: BatchTimes) -> None:
        (pending,) = batch.requests
        if self._tracer is not None and self._tracer.enabled:
            self._record(self._tracer, batch, times)
        now_ns = self._now_ns()
        kind = Answer.CANCEL if pending.done is None else Answer.FAIL if error is not None else Answer.EMPTY
        self._statistics.responded(number, kind, times.ran_ns, now_ns)
        if error is not None:
            self._fail(pending, error, Failure.BACKEND)
        elif pending.done is not None:
            self._log.executed([pending.arrived_ns], batch.rows, batch.reason, times, now_ns)
            request = pending.request
            self._end(pending, InferResponse(request.model_name, request.model_version, {}, request.id))


def _tell(done: Done, outcome: Outcome) -> None:
    try:
        done(outcome)
    except Exception:  # noqa: BLE001 - a receiver's bug must not keep the others' answers from them
        _log.exception("a receiver failed")


def _response(request: InferRequest, outputs: dict[str, Array]) -> Outcome:
    if request.outputs:
        return _chosen(request, outputs)
    return InferResponse(request.model_name, request.model_version, outputs, request.id)


def _chosen(request: InferRequest, outputs: dict[str, Array]) -> Outcome:
    try:
        chosen = {name: outputs[name] for name in request.outputs}
    except KeyError as error:
        return PenstockError(f"the model gave no output '{error.args[0]}'")
    return InferResponse(request.model_name, request.model_version, chosen, request.id)
