"""Single flight: equal requests that are asked at one time are answered by one run of the model.

    start → look up in the second tier → run → ended: everybody has the answer
                  │ found                  ▲ │ the run ended for reasons of whoever was run
                  └──────→ ended           └─┘ the next in line is run

A request that is cancelled or too late leaves. The run continues while a request waits for it, and is cancelled otherwise.
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
"""Errors that say nothing about equal requests: these may have more time, or come when the queue has room again."""


Submit = Callable[[Done], Cancellable | None]
"""Hands a request to the scheduler, which calls ``done`` once, perhaps before this returns None. Raises PenstockError."""
Lookup = Callable[[Callable[[CachedAnswer | None], None]], Cancellable | None]
"""Asks the second tier. Once cancelled it calls nothing."""


class Waiter(msgspec.Struct, eq=False):
    """One request that waits; what the data plane gets to cancel it by."""

    request: InferRequest
    done: Done
    submit: Submit
    arrived_ns: int
    lookup_ns: int
    """How long it took to find that no answer was kept."""
    flight: Flight | None = None
    """None once it has left."""
    timer: asyncio.TimerHandle | None = None
    left: Callable[[], None] | None = None

    def cancel(self) -> None:
        if self.flight is not None:
            self.flight.leave(self, Cancelled("the request was cancelled"))


class Flight:
    """See the module. Belongs to the event loop.

    ``keep`` is given the answer, and whether it is a new one; ``ended`` is called once, before anybody is answered for good.
    Of the requests answered by one run the statistics count the first as run and the others as hits.
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
        """Begin with the first in line; None if it has been answered when this returns."""
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
        """Wait for the answer; ``left`` is called when ``waiter`` is answered."""
        self._waiters[waiter] = None
        waiter.flight, waiter.left = self, left
        deadline = waiter.request.deadline
        if deadline is not None:
            # The scheduler minds only the deadline of the request that it runs.
            loop = asyncio.get_running_loop()
            waiter.timer = loop.call_later(max(0, deadline.remaining(self._clock)), self._expire, waiter)
        return waiter

    def leave(self, waiter: Waiter, error: PenstockError) -> None:
        """Answer ``waiter``, which waits, with ``error`` and without the others."""
        del self._waiters[waiter]
        if self._waiters:
            self._count_failure(waiter, error)
            self._tell(waiter, error)
            return
        self._ended()
        work, self._work = self._work, None
        if self._submitter is None:
            self._count_failure(waiter, error)
        # Otherwise the scheduler counts the run.
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
        """Run the first in line; if all have left there is nothing to do."""
        waiter = self._submitter = next(iter(self._waiters), None)
        if waiter is None:
            return
        self._statistics.cache_miss(waiter.lookup_ns)
        try:
            work = waiter.submit(self._ran)
        except PenstockError as error:
            self._ran(error)
        except Exception:  # noqa: BLE001 - a bug of ours must not leave all of them without an answer
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
        """The run ended for reasons of ``submitter``, who may have left: run the next."""
        if not self._waiters:
            return
        failed = submitter if submitter is not None and submitter in self._waiters else None
        if failed is not None:
            del self._waiters[failed]
        if self._waiters:
            # By way of the loop: a queue that refuses all of them would else be a recursion as deep as they are many.
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
                _log.warning("an answer of model '%s' cannot be kept: %s", response.model_name, error)
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
        """All who wait, in line; from now on none can leave."""
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
            self.leave(waiter, DeadlineExceeded("the request's deadline passed while it waited for an equal request"))

    def _count_hit(self, waiter: Waiter) -> None:
        self._statistics.cache_hit(waiter.arrived_ns, waiter.lookup_ns, time.monotonic_ns())

    def _count_failure(self, waiter: Waiter, error: PenstockError) -> None:
        self._statistics.failed(Failure.of(error), waiter.arrived_ns, time.monotonic_ns())
