"""The base of schedulers that pass each request through a graph of steps: of ensembles and of pipelines.

Such a scheduler has no instances. Its steps send requests to the schedulers of models, which may merge them with other requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Protocol

from penstock.errors import Cancelled, DeadlineExceeded, PenstockError, Unavailable, prefixed
from penstock.online.scheduler.answers import Answers
from penstock.online.scheduler.base import Cancellable
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.queue import Pending
from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.fairness import FairQueue, Flows, Item
from penstock.pipeline.value import Value
from penstock.request import Done, InferRequest
from penstock.telemetry.statistics import BatchTimes, Failure, ModelStatistics, Reason
from penstock.telemetry.tracing import Tracer
from penstock.tensor import Array

_log = logging.getLogger(__name__)

_INLINE_BYTES = 64 << 10
"""Values of at most this number of bytes are converted on the event loop, because switching threads takes longer."""


class Run(Protocol):
    """One run of a graph."""

    def begin(self, inputs: Mapping[str, Array]) -> None:
        """Start the run. Called once."""
        ...

    def cancel(self) -> None:
        """End the run with Cancelled, unless it has ended. Idempotent."""
        ...


class Passing(Pending, eq=False, kw_only=True):
    """A request, and its progress through the graph. The requests to the models are created from ``request``."""

    item: Item
    """The request's place among the requests of all clients."""
    is_waiting: bool = True
    run: Run | None = None
    release: Callable[[], object] = lambda: None
    """Called when the request ends."""
    started_ns: int = 0
    timer: asyncio.TimerHandle | None = None
    """The timer that ends the request at its deadline."""
    is_late: bool = False
    """True if the deadline has passed."""

    @property
    def is_cancelled(self) -> bool:
        """True if the request has ended while it waited."""
        return not self.is_waiting


class GraphScheduler(ABC):
    """The ``Scheduler`` that the module's docstring describes. ``title`` is such as ``ensemble 'x'``.

    ``max_inside`` is the maximum number of requests in progress. Further requests wait, and clients take turns. 0 means no limit.
    """

    def __init__(
        self,
        title: str,
        max_inside: int,
        config: BatchingConfig,
        loop: asyncio.AbstractEventLoop,
        statistics: ModelStatistics,
        tracer: Tracer | None = None,
        flows: Flows | None = None,
    ) -> None:
        self.config = config
        self._title = title
        self._max_inside = max_inside
        self._loop = loop
        self._statistics = statistics
        self._answers = Answers(statistics, time.monotonic_ns, tracer)
        self._flows = Flows() if flows is None else flows
        self._waiting = FairQueue[Passing]()
        self._inside = self._submitted = 0
        self._stopped = False

    @property
    def statistics(self) -> ModelStatistics:
        """The statistics of the whole graph. The time for which requests wait for the models counts as compute time."""
        return self._answers.statistics

    @abstractmethod
    def _prepare(self, passing: Passing) -> None:
        """Set the ``run`` of ``passing``, which calls ``_ended``, and what it holds. Raises Unavailable."""

    @abstractmethod
    def _to_client(self, told: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs for the client, from those of the graph. Raises PenstockError."""

    @abstractmethod
    def _to_graph(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The inputs of the graph, from those of the client. Raises PenstockError."""

    def submit(self, request: InferRequest, rows: int, key: Hashable, done: Done) -> Cancellable:
        """See ``Scheduler.submit``. Raises Unavailable if the queue is full or stopped, or a model is not served."""
        if self._stopped:
            raise self._answers.refused(Unavailable(f"model '{self._statistics.name}' is being unloaded"))
        if self._statistics.pending >= self.config.max_queue:
            full = f"the queue of model '{self._statistics.name}' is full"
            raise self._answers.refused(Unavailable(full, "try again later"))
        self._submitted, now_ns = self._submitted + 1, time.monotonic_ns()
        item = Item(self._submitted, self._flows.enter(request.origin), self._size(request.inputs))
        passing = Passing(self, self._submitted, request, rows, key, done, now_ns, item=item)
        try:
            self._prepare(passing)
        except Unavailable as error:
            self._flows.leave(item)
            raise self._answers.refused(error) from None
        self._statistics.pending += 1
        self._waiting.add(passing)
        if request.deadline is not None and self._max_inside:
            left_s = max(0.0, request.deadline.at - now_ns / 1e9)
            passing.timer = self._loop.call_later(left_s, self._expire, passing)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._admit)
        return passing

    def cancel(self, pending: Pending) -> None:
        """Cancel ``pending``, see ``Pending.cancel``."""
        if not isinstance(pending, Passing):
            return
        if pending.run is not None:
            pending.run.cancel()
        else:  # its outputs are being converted
            self._finish(pending, Cancelled("the request was cancelled"))

    def hurry(self) -> None:  # noqa: B027 - part of the interface
        """Do nothing, because the requests wait in the queues of the models."""

    async def drain(self) -> None:
        """Wait until every request has ended."""
        await self._answers.drain()

    def stop(self) -> None:
        """Refuse further requests."""
        self._stopped = True

    def _size(self, values: Mapping[str, Value]) -> int:
        """The bytes of ``values``; 0 if converting them takes no time."""
        return 0

    def _admit(self) -> None:
        """Start waiting requests, in order of arrival within a client."""
        most = self._max_inside
        while (not most or self._inside < most) and (passing := self._waiting.first()) is not None:
            self._waiting.remove(passing)
            passing.is_waiting = False
            self._inside += 1
            passing.started_ns = time.monotonic_ns()
            inputs, passing.request.inputs = passing.request.inputs, {}
            self._convert(self._to_graph, inputs, partial(self._begin, passing))

    def _begin(self, passing: Passing, converted: Told) -> None:
        if passing.run is None:
            return  # the request has been cancelled
        if isinstance(converted, PenstockError):
            self._ended(passing, converted)
        else:
            passing.run.begin(converted)

    def _convert(
        self,
        convert: Callable[[Mapping[str, Value]], Mapping[str, Value]],
        values: Mapping[str, Value],
        then: Callable[[Told], None],
    ) -> None:
        """Call ``then`` with the outcome of ``convert(values)``, on the event loop: now or, if ``values`` are large, later."""
        if self._size(values) <= _INLINE_BYTES:
            then(self._attempted(convert, values))
            return
        converting = self._loop.run_in_executor(None, self._attempted, convert, values)
        converting.add_done_callback(lambda ended: None if ended.cancelled() else then(ended.result()))

    def _attempted(
        self, convert: Callable[[Mapping[str, Value]], Mapping[str, Value]], values: Mapping[str, Value]
    ) -> Told:
        """The outcome of ``convert(values)``. Whatever happens, the request is answered."""
        try:
            return convert(values)
        except PenstockError as error:
            return error
        except Exception:  # noqa: BLE001 - reported to the client
            _log.exception("%s failed", self._title)
            return PenstockError("internal error")

    def _expire(self, passing: Passing) -> None:
        if passing.is_waiting:
            self._ended(passing, DeadlineExceeded("the request's deadline passed while it waited"))
        else:
            passing.is_late = True
            self.cancel(passing)

    def _ended(self, passing: Passing, told: Told) -> None:
        passing.release()
        passing.run = None  # breaks the reference cycle
        if isinstance(told, PenstockError):
            self._finish(passing, told)
        else:
            self._convert(self._to_client, told, partial(self._finish, passing))

    def _finish(self, passing: Passing, told: Told) -> None:
        if passing.done is None:
            return  # the request was cancelled while its outputs were converted
        if passing.is_waiting:
            passing.is_waiting = False
        else:
            self._inside -= 1
        if passing.timer is not None:
            passing.timer.cancel()
        self._flows.leave(passing.item)
        if self._waiting:
            self._loop.call_soon(self._admit)
        if isinstance(told, Cancelled) and passing.is_late:
            told = DeadlineExceeded("the request's deadline passed while it ran")
        if isinstance(told, PenstockError):
            named = told if isinstance(told, Cancelled) else prefixed(f"in {self._title}, ", told)
            self._answers.fail(passing, named, Failure.of(told))
            return
        started_ns, now_ns = passing.started_ns, time.monotonic_ns()
        times = BatchTimes(started_ns, started_ns, now_ns, now_ns)
        self._answers.give(Batch([passing], passing.rows, Reason.ALONE, started_ns), [dict(told)], times, now_ns)
