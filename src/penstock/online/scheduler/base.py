"""The scheduler seam: what takes over requests for one model version, and what its instances take them from."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from penstock.errors import PenstockError
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.layout import BatchLayout
from penstock.online.scheduler.queue import Pending
from penstock.online.scheduler.rate_limiter import Gate
from penstock.request import Done, InferRequest
from penstock.telemetry.statistics import BatchTimes, ModelStatistics
from penstock.tensor import Array


class InstanceDied(PenstockError):
    """The process that ran the model ended in the middle of a batch. Any request may have caused it, so none is tried again."""


class Cancellable(Protocol):
    """A request that has been taken over."""

    def cancel(self) -> object:
        """Give the request up, on the event loop. ``done`` is called with Cancelled before this returns, unless it had its last
        answer before. Idempotent."""
        ...


class Scheduler(Protocol):
    """Belongs to the event loop. Every request submitted ends exactly once: with a result, an error, or by being cancelled."""

    @property
    def config(self) -> BatchingConfig: ...

    @property
    def statistics(self) -> ModelStatistics: ...

    def submit(self, request: InferRequest, rows: int, key: Hashable, done: Done) -> Cancellable | None:
        """Take over ``request``, already checked; ``rows`` and ``key`` are the check's. ``done`` is called on the event loop, never
        before this returns; None is returned if nothing is left to cancel.

        Raises PenstockError at once if the request is refused; then it counts as failed, and ``done`` is not called.
        """
        ...

    async def drain(self) -> None:
        """Return when every request submitted has been answered."""
        ...

    def stop(self) -> None:
        """Take no more requests; instances leave when the queue is empty."""
        ...


class BatchSource(Protocol):
    """What instances work for. All but ``may_run_here`` and ``dismiss`` are called on an instance's thread."""

    @property
    def config(self) -> BatchingConfig: ...

    @property
    def layout(self) -> BatchLayout:
        """How a batch's requests become what the model is given, and its outputs theirs."""
        ...

    def may_run_here(self, run: Callable[[Batch], None]) -> None:
        """``run`` computes a batch and gives it back, as the thread of the instance that is about to start does, but may be called
        on the event loop while that thread rests: it waits for nothing. At most once for each instance."""
        ...

    def take(self, gate: Gate | None = None) -> Batch | None:
        """The next batch; blocks while there is none; None if the instance shall end.

        With ``gate``, a batch is given only while that is held, and what it held for the batch before is given back.
        """
        ...

    def finish(self, batch: Batch, outcome: list[dict[str, Array]] | PenstockError, times: BatchTimes) -> None:
        """Give back a batch taken, or a part of it, with the outputs of each request, or the error of the whole batch."""
        ...

    def answer(
        self, pending: Pending, outputs: dict[str, Array], number: int, times: BatchTimes, taken: Callable[[], None]
    ) -> bool:
        """One answer, not the last, of a decoupled model: its ``number``-th from 0, for which the model worked from ``merged_ns``
        to ``ran_ns``. ``taken`` is called once it has been passed on. False if the event loop is closed."""
        ...

    def finish_stream(self, batch: Batch, error: PenstockError | None, number: int, times: BatchTimes) -> None:
        """The end of a decoupled model's ``number`` answers to the one request of ``batch``."""
        ...

    def leave(self, run: Callable[[Batch], None] | None) -> None:
        """The instance has ended; ``run`` is what it gave to ``may_run_here``, if anything."""
        ...

    def dismiss(self) -> None:
        """Have one instance, the next that is free, end: its ``take`` returns None."""
        ...
