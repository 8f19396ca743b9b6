"""Single flight: one run of the model answers all equal requests that arrive before the run ends.

    start → look up in the second tier → run → ended: all requests are answered
                  │ found                  ▲ │ the run failed because of this request's deadline or a full queue
                  └──────→ ended           └─┘ submit the next request

A request that is cancelled or whose deadline passes leaves the flight. The run is cancelled once no request waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from penstock.clock import Clock
from penstock.errors import Cancelled, Code, DeadlineExceeded, PenstockError
from penstock.online.cache.answer import CachedAnswer, freeze
from penstock.online.scheduler.answers import tell
from penstock.online.scheduler.base import Cancellable
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import Failure, ModelStatistics

_log = logging.getLogger(__name__)

_OF_ONE_REQUEST = frozenset({Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE})
"""Errors of a single request. An equal request may have a later deadline or find space in the queue."""


Submit = Callable[[Done], Cancellable | None]
"""Submits a request to the scheduler, which calls ``done`` once. Returns None if the scheduler has already called ``done``. Raises
PenstockError."""
Lookup = Callable[[Callable[[CachedAnswer | None], None]], Cancellable | None]
"""Looks up the response in the second tier and passes it to a callback. A cancelled look-up does not call the callback."""


class Waiter(msgspec.Struct, eq=False):
    """A request that waits for the response. ``cancel`` removes the request from the flight."""

    request: InferRequest
    done: Done
    submit: Submit
    arrived_ns: int
    lookup_ns: int
    """Duration of the look-up in the cache, in nanoseconds."""
    flight: Flight | None = None
    """None once the request has left the flight or has been answered."""
    timer: asyncio.TimerHandle | None = None
    left: Callable[[], None] | None = None

    def cancel(self) -> None:
        if self.flight is not None:
            self.flight.leave(self, Cancelled("the request was cancelled"))


class Flight:
    """The equal requests that wait for one response. Used only on the event loop.

    ``keep`` is called with the response, and with True if the model computed the response. ``ended`` is called once, before the last
    requests are answered. In the statistics, the submitted request counts as executed. The other requests count as cache hits.
    """

    def __init__(
        self,
        clock: Clock,
        statistics: ModelStatistics,
        max_answer_bytes: int,
        keep: Callable[[CachedAnswer, bool], None],
        ended: Callable[[], object],
    ) -> None:
        self._clock = clock
        self._statistics = statistics
        self._max_answer_bytes = max_answer_bytes
        self._keep = keep
        self._ended = ended
        self._waiters: dict[Waiter, None] = {}
        self._submitter: Waiter | None = None
        self._work: Cancellable | None = None

    def start(self, waiter: Waiter, lookup: Lookup | None) -> Cancellable | None:
        """Start with the first request. Returns None if the request has already been answered."""
        self._waiters[waiter] = None
        waiter.flight = self
        if lookup is None:
            self._run()
        else:
            work = lookup(self._looked_up)
            if work is not None:
                self._work = work
        return None if waiter.flight is None else waiter

    def join(self, waiter: Waiter, left: Callable[[], None]) -> Cancellable:
        """Add the request ``waiter``. ``left`` is called when the request has been answered."""
        self._waiters[waiter] = None
        waiter.flight, waiter.left = self, left
        deadline = waiter.request.deadline
        if deadline is not None:
            # The scheduler knows only the deadline of the submitted request.
            loop = asyncio.get_running_loop()
            waiter.timer = loop.call_later(max(0, deadline.remaining(self._clock)), self._expire, waiter)
        return waiter

    def leave(self, waiter: Waiter, error: PenstockError) -> None:
        """Remove ``waiter`` from the flight and answer only this request with ``error``."""
        del self._waiters[waiter]
        if self._waiters:
            self._count_failure(waiter, error)
            self._tell(waiter, error)
            return
        self._ended()
        work, self._work = self._work, None
        if self._submitter is None:
            self._count_failure(waiter, error)
        # For a submitted request, the scheduler counts the failure.
        if work is not None:
            work.cancel()
        self._tell(waiter, error)

    def _looked_up(self, answer: CachedAnswer | None) -> None:
        self._work = None
        if answer is None:
            self._run()
            return
        self._ended()
        self._keep(answer, False)
        for waiter in self._take():
            self._count_hit(waiter)
            self._tell(waiter, answer.to(waiter.request))

    def _run(self) -> None:
        """Submit the first request, unless all requests have left."""
        waiter = self._submitter = next(iter(self._waiters), None)
        if waiter is None:
            return
        self._statistics.cache_miss(waiter.lookup_ns)
        try:
            work = waiter.submit(self._ran)
        except PenstockError as error:
            self._ran(error)
        except Exception:  # noqa: BLE001 - a bug must not leave requests unanswered
            _log.exception("a request could not be submitted")
            self._ran(PenstockError("internal error"))
        else:
            if work is not None:
                self._work = work

    def _ran(self, outcome: Outcome) -> None:
        submitter, self._submitter = self._submitter, None
        self._work = None
        if isinstance(outcome, InferResponse):
            self._share(outcome, submitter)
        elif outcome.code in _OF_ONE_REQUEST:
            self._next(outcome, submitter)
        elif self._waiters:
            self._ended()
            for number, waiter in enumerate(self._take()):
                if number:
                    self._count_failure(waiter, outcome)
                self._tell(waiter, outcome)

    def _next(self, error: PenstockError, submitter: Waiter | None) -> None:
        """Answer ``submitter``, whose run failed because of its own deadline or a full queue, and submit the next request."""
        if not self._waiters:
            return
        failed = submitter if submitter is not None and submitter in self._waiters else None
        if failed is not None:
            del self._waiters[failed]
        if self._waiters:
            # Scheduled on the event loop, because direct calls would recurse once per request if the queue rejects all requests.
            asyncio.get_running_loop().call_soon(self._run)
        else:
            self._ended()
        if failed is not None:
            self._tell(failed, error)

    def _share(self, response: InferResponse, submitter: Waiter | None) -> None:
        if self._waiters:
            self._ended()
        answer = None
        fits = sum(array.nbytes for array in response.outputs.values()) <= self._max_answer_bytes
        if fits or len(self._waiters) > 1:
            try:
                answer = freeze(response)
            except PenstockError as error:
                _log.warning("a response of model '%s' cannot be cached: %s", response.model_name, error)
        if answer is not None and fits:
            self._keep(answer, True)
        for number, waiter in enumerate(self._take()):
            if number:
                self._count_hit(waiter)
            if waiter is submitter:
                self._tell(waiter, response)
            elif answer is not None:
                self._tell(waiter, answer.to(waiter.request))
            else:
                self._tell(waiter, msgspec.structs.replace(response, id=waiter.request.id))

    def _take(self) -> list[Waiter]:
        """Remove and return all waiters, in order. The removed waiters can no longer leave the flight."""
        waiters = list(self._waiters)
        self._waiters.clear()
        for waiter in waiters:
            waiter.flight = None
        return waiters

    def _tell(self, waiter: Waiter, outcome: Outcome) -> None:
        waiter.flight = None
        if waiter.timer is not None:
            waiter.timer.cancel()
        if waiter.left is not None:
            waiter.left()
        tell(waiter.done, outcome)

    def _expire(self, waiter: Waiter) -> None:
        if waiter.flight is not None:
            self.leave(
                waiter,
                DeadlineExceeded("the request's deadline passed while it waited for the response to an equal request"),
            )

    def _count_hit(self, waiter: Waiter) -> None:
        self._statistics.cache_hit(waiter.arrived_ns, waiter.lookup_ns, time.monotonic_ns())

    def _count_failure(self, waiter: Waiter, error: PenstockError) -> None:
        self._statistics.failed(Failure.of(error), waiter.arrived_ns, time.monotonic_ns())
