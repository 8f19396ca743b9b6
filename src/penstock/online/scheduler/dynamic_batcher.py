"""The queue of one model version, from which the model's instances take batches.

Without a configured delay, a request never waits for further requests. Requests that arrive while all instances are busy form a
batch when the next instance is free. An idle instance starts immediately with the requests of one event-loop iteration.

Threads: the instances call ``take``, ``finish``, ``answer``, ``finish_stream`` and ``leave``. All other methods are called on the
event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any

import msgspec

from penstock.errors import Cancelled, DeadlineExceeded, PenstockError, Unavailable
from penstock.online.scheduler.answers import Answers
from penstock.online.scheduler.arrival_order import ArrivalOrder
from penstock.online.scheduler.batching_config import BatchingConfig, QueuePolicy
from penstock.online.scheduler.brief_runs import BriefRuns
from penstock.online.scheduler.forming import Batch, Rules, Wait, form
from penstock.online.scheduler.latency_model import LatencyModel
from penstock.online.scheduler.layout import BatchLayout, MergedRows, SingleRequest
from penstock.online.scheduler.queue import NEVER, Pending, Queue
from penstock.online.scheduler.rate_limiter import ResourceGate
from penstock.request import Done, InferRequest
from penstock.telemetry.statistics import BatchTimes, Failure, ModelStatistics
from penstock.telemetry.tracing import Tracer
from penstock.tensor import Array


class _Sleeper(msgspec.Struct, eq=False):
    """An idle instance. It waits on its own lock.

    Idle instances cannot share a queue, because ``queue.SimpleQueue.get`` of CPython 3.11 may compute a negative timeout and wait
    forever. This happens if another thread takes the item that woke the waiting thread, or if the timeout is a microsecond.
    """

    until_ns: int
    """The time at which the instance checks the queue again; NEVER if only a request wakes it."""
    woken: Lock
    """Held until the instance is woken."""
    batch: Batch | None = None
    """The batch to run when woken; None to check the queue."""


class DynamicBatcher:
    """The ``Scheduler`` that the module's docstring describes. ``now_ns`` is the clock for all times, including deadlines."""

    def __init__(
        self,
        config: BatchingConfig,
        loop: asyncio.AbstractEventLoop,
        statistics: ModelStatistics | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        tracer: Tracer | None = None,
        layout: BatchLayout | None = None,
    ) -> None:
        self.config = config
        self.layout: BatchLayout = layout or (
            MergedRows() if config.batchable and not config.decoupled else SingleRequest()
        )
        self.instances = config.instances
        self._statistics = ModelStatistics() if statistics is None else statistics
        self._answers = Answers(self._statistics, now_ns, tracer)
        self.latency = LatencyModel()
        self._now_ns = now_ns
        self._loop = loop
        self._rules = Rules.of(config)
        self._order = ArrivalOrder() if config.preserve_ordering else None
        # True if there are no priority levels, timeouts or ordering, so that only deadlines need checking.
        self._is_plain = config.policies == [QueuePolicy()] and not config.preserve_ordering
        self._arrived: list[Pending] = []
        self._arrived_rows = 0
        self._submitted = 0
        self._predicts = False
        """True once a request has had a deadline; before that, latency is not measured."""
        self._brief = BriefRuns()
        self._is_running_here = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = NEVER
        self._lock = Lock()
        # The lock guards all attributes below.
        self._queue = Queue(config.policies)
        self._idle: list[_Sleeper] = []
        self._stopped = False
        self._dismissed = 0
        """Number of instances that have been dismissed but have not left yet."""
        self._runners: list[Callable[[Batch], None]] = []
        """Functions that run a batch on the event loop, one for each instance that allows it."""
        self._hands_over = self._is_plain
        """True if requests may bypass the queue and go directly to an idle instance."""

    @property
    def statistics(self) -> ModelStatistics:
        """The statistics, including all recorded batches."""
        return self._answers.statistics

    def may_run_here(self, run: Callable[[Batch], None]) -> None:
        """Allow the event loop to call ``run``, which runs and finishes a batch, while the instance's own thread is idle.

        An instance calls this at most once, before it starts.
        """
        with self._lock:
            self._runners.append(run)

    def leave(self, run: Callable[[Batch], None] | None) -> None:
        """Unregister an instance that has ended. ``run`` is the argument that it passed to ``may_run_here``, if any."""
        with self._lock:
            if run is not None:
                self._runners.remove(run)

    def dismiss(self) -> None:
        """End the next free instance: its call of ``take`` returns None."""
        with self._lock:
            self._dismissed += 1
            if self._idle:
                self._wake()

    def expect(self, instances: int) -> None:
        """Set the number of instances, for the prediction of queueing times."""
        self.instances = instances

    def submit(self, request: InferRequest, rows: int, key: Hashable, done: Done) -> Pending:
        """Queue ``request``. See ``Scheduler.submit``.

        Raises Unavailable if the queue is full or stopped, and DeadlineExceeded if the answer is predicted to be late.
        """
        statistics = self._statistics
        if statistics.pending >= self.config.max_queue or self._stopped:
            full = Unavailable(f"the queue of model '{request.model_name}' is full", "try again later")
            gone = Unavailable(f"model '{request.model_name}' is being unloaded")
            raise self._answers.refused(gone if self._stopped else full)
        self._submitted = number = self._submitted + 1
        pending = Pending(self, number, request, rows if self.config.batchable else 1, key, done, self._now_ns())
        if not self._is_plain or request.deadline is not None:
            self._admit(pending, done)
        statistics.pending += 1
        if not self._arrived:
            self._loop.call_soon(self._flush)
        self._arrived.append(pending)
        self._arrived_rows += pending.rows
        return pending

    def cancel(self, pending: Pending) -> None:
        """Cancel ``pending``. See ``Pending.cancel``."""
        with self._lock:
            self._queue.remove(pending)
        self._answers.fail(pending, Cancelled("the request was cancelled"), Failure.CANCELED)

    def take(self, gate: ResourceGate | None = None) -> Batch | None:
        """Wait for the next batch. Returns None if the instance has to end.

        With ``gate``, first release the resources of the previous batch, and wait for the resources of the next batch. Requests
        may join the batch until the gate opens.
        """
        is_open = gate is None
        if gate is not None:
            self._hands_over = False
        while True:
            found = self._look(is_open)
            if isinstance(found, Batch):
                if gate is None or is_open:
                    return found
                gate.enter()
                is_open = True
                continue
            if gate is not None:
                gate.leave(unused=is_open)
                is_open = False
            if found is None:
                return None
            if (batch := self._rest(found)) is not None:
                return batch

    def finish(self, batch: Batch, outcome: list[dict[str, Array]] | PenstockError, times: BatchTimes) -> None:
        """End the requests of a batch or of a part of it. ``outcome`` is the outputs of each request, or one error."""
        if self._is_running_here:
            self._complete(batch, outcome, times)
        else:
            self._call(self._complete, batch, outcome, times)

    def answer(
        self, pending: Pending, outputs: dict[str, Array], number: int, times: BatchTimes, taken: Callable[[], None]
    ) -> bool:
        """Forward answer ``number`` (from 0) of a decoupled model, except the final one. Returns False if the event loop is closed.

        The model computed the answer from ``times.merged_ns`` to ``times.ran_ns``. ``taken`` is called once the event loop has
        received the answer.
        """
        return self._call(self._answers.give_one, pending, outputs, number, times, taken)

    def finish_stream(self, batch: Batch, error: PenstockError | None, number: int, times: BatchTimes) -> None:
        """End the only request of ``batch``. The decoupled model has sent ``number`` answers."""
        self._call(self._answers.end_stream, batch, error, number, times)

    async def drain(self) -> None:
        """Return when every submitted request has been answered."""
        await self._answers.drain()

    def hurry(self) -> None:
        """See ``Scheduler``."""
        self._flush()
        with self._lock:
            self._rules = Rules.of(msgspec.structs.replace(self.config, max_queue_delay_microseconds=0))
            while self._idle:
                self._wake()

    def stop(self) -> None:
        """Refuse further requests. Instances end when the queue is empty."""
        self._flush()
        with self._lock:
            self._stopped = True
        self.hurry()

    def _admit(self, pending: Pending, done: Done) -> None:
        """Set the request's level, timeout, deadline and position in the queue. Raises Unavailable and DeadlineExceeded."""
        request, now_ns = pending.request, pending.arrived_ns
        number = request.priority
        if not 1 <= number <= self.config.priority_levels:
            number = self.config.default_priority_level or 1
        level = self._queue.levels[number - 1]
        pending.lane = 2 * (number - 1)
        policy = level.policy
        if policy.max_queue_size and level.waiting >= policy.max_queue_size:
            raise self._answers.refused(Unavailable("Exceeds maximum queue size", "try again later"))
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
        """Raise DeadlineExceeded if the requests ahead and the request's own batch are predicted to take too long."""
        now_ns, rows, latency = pending.arrived_ns, pending.rows, self.latency
        left_ns = pending.deadline_ns - now_ns
        if left_ns <= 0:
            raise self._answers.refused(DeadlineExceeded("the request's deadline has passed"))
        if self.config.decoupled:
            return  # a decoupled model sends its first answers early, and the client may not need further answers
        self._predicts = True
        max_rows = self._rules.max_rows
        ahead = sum(level.rows for level in self._queue.levels[: (pending.lane >> 1) + 1]) + self._arrived_rows
        full, over = divmod(ahead, max_rows)
        took_ns = latency.mean(max(rows, min(over + rows, max_rows)), now_ns)
        took_ns += full * latency.mean(max_rows, now_ns) // max(1, self.instances)
        if took_ns > left_ns:
            message = f"the answer is expected in {took_ns / 1e6:.1f} ms, and the deadline is in {left_ns / 1e6:.1f} ms"
            raise self._answers.refused(DeadlineExceeded(message, "use a longer deadline, or try again later"))

    def _flush(self) -> None:
        """Queue the requests of one event-loop iteration. Acquires the lock once and wakes at most one instance."""
        arrived = self._arrived
        if not arrived:
            return
        self._arrived, self._arrived_rows = [], 0
        here = False
        with self._lock:
            batch = self._at_once(arrived) if self._idle and self._hands_over else None
            if batch is None:
                self._queue.extend(arrived)
                if self._idle and self._is_due():
                    self._wake()
            else:
                here = len(self._idle) == len(self._runners) and self._brief.allow(arrived[0].key, batch.rows)
                if not here:
                    self._wake(batch)
            next_ns = self._queue.next_ns
        if here and batch is not None:
            # All instances are idle, and only this thread can wake one.
            self._is_running_here = True
            try:
                self._runners[0](batch)
            finally:
                self._is_running_here = False
        elif next_ns < self._timer_ns:
            self._set_timer(next_ns)

    def _at_once(self, arrived: list[Pending]) -> Batch | None:
        """One batch of all requests ``arrived``, which then bypass the queue. None if the requests do not fit into one batch, or
        other requests are waiting.
        """
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

    def _look(self, takes: bool) -> Batch | _Sleeper | None:
        """Find work for a free instance. Returns a batch, or a sleeper on which to wait, or None if the instance has to end.

        With ``takes``, the batch leaves the queue. If several instances wait until the same time, only the first of them wakes then.
        """
        found: Batch | _Sleeper | None = None
        with self._lock:
            expired, formed = self._decide(self._now_ns())
            if self._dismissed:
                self._dismissed -= 1
            elif isinstance(formed, Batch):
                found = formed
                if takes:
                    self._queue.take(formed.requests, formed.rows)
            elif not self._stopped:
                until_ns = formed.until_ns if formed.until_ns < self._watched_ns() else NEVER
                found = _Sleeper(until_ns, Lock())
                found.woken.acquire()
                self._idle.append(found)
            if self._idle and self._queue and not isinstance(found, _Sleeper):
                self._wake()
        if expired or formed.late:
            self._call(self._drop, expired, formed.late)
        return found

    def _watched_ns(self) -> int:
        """The time at which the first idle instance checks the queue again."""
        return min((sleeper.until_ns for sleeper in self._idle), default=NEVER)

    def _is_due(self) -> bool:
        """True if an idle instance has to check the queue, because requests may leave, or the time to wait has become shorter."""
        if not self._rules.delay_ns:
            return True
        formed = self._form(self._now_ns())
        return isinstance(formed, Batch) or bool(formed.late) or formed.until_ns < self._watched_ns()

    def _decide(self, now_ns: int) -> tuple[Sequence[Pending], Batch | Wait]:
        """Returns the expired requests, and the decision about the remaining requests."""
        expired = self._queue.expire(now_ns) if self._queue.next_ns <= now_ns else ()
        formed = self._form(now_ns)
        for pending in formed.late:
            self._queue.remove(pending)
        return expired, formed

    def _form(self, now_ns: int) -> Batch | Wait:
        predicts = self._predicts and self._queue.next_ns < NEVER
        return form(self._queue.lines(), now_ns, self._rules, self.latency if predicts else None)

    def _wake(self, batch: Batch | None = None) -> None:
        sleeper = self._idle.pop()
        sleeper.batch = batch
        sleeper.woken.release()

    def _rest(self, sleeper: _Sleeper) -> Batch | None:
        """Wait for a batch, for a wake-up to check the queue, or until ``sleeper.until_ns``."""
        if sleeper.until_ns == NEVER:
            sleeper.woken.acquire()
        elif not sleeper.woken.acquire(timeout=max(0.0, (sleeper.until_ns - self._now_ns()) / 1e9)):
            with self._lock:
                if sleeper in self._idle:  # otherwise another thread woke the instance just as the wait ended
                    self._idle.remove(sleeper)
        if sleeper.batch is not None:
            sleeper.batch.taken_ns = self._now_ns()
        return sleeper.batch

    def _set_timer(self, at_ns: int) -> None:
        """Call ``_on_timer`` at ``at_ns``, or up to two milliseconds later because event loops use whole milliseconds."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = at_ns
        self._timer = self._loop.call_later(max(0, at_ns - self._now_ns()) // 1_000_000 / 1e3 + 1e-3, self._on_timer)

    def _on_timer(self) -> None:
        """End expired requests even if no instance becomes free."""
        self._timer, self._timer_ns = None, NEVER
        with self._lock:
            expired = self._queue.expire(self._now_ns())
            next_ns = self._queue.next_ns
        if next_ns < NEVER:
            self._set_timer(next_ns)
        self._drop(expired, ())

    def _call(self, callback: Callable[..., None], *args: Any) -> bool:
        """Call ``callback`` on the event loop. Returns False if the loop is closed because the server exited without waiting."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True

    def _drop(self, expired: Sequence[Pending], late: Sequence[Pending]) -> None:
        for pending in expired:
            error: PenstockError = Unavailable("Request timeout expired", "the timeout of the model's queue has passed")
            if pending.expires_ns == pending.deadline_ns:
                error = DeadlineExceeded("the request's deadline passed while it waited")
            self._answers.fail(pending, error, Failure.REJECTED)
        for pending in late:
            error = DeadlineExceeded("the answer would be later than the request's deadline", "use a longer deadline")
            self._answers.fail(pending, error, Failure.REJECTED)

    def _complete(self, batch: Batch, outcome: list[dict[str, Array]] | PenstockError, times: BatchTimes) -> None:
        now_ns = self._now_ns()
        if isinstance(outcome, PenstockError):
            self._brief.failed()
        else:
            if self._predicts:
                self.latency.observe(batch.rows, now_ns - batch.taken_ns, now_ns)
            if self._runners:
                self._brief.observe(batch.requests[0].key, batch.rows, times.split_ns - times.taken_ns)
        self._answers.give(batch, outcome, times, now_ns)
