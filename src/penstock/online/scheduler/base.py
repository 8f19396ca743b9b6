"""The scheduler seam: what takes over requests for one model version, and what its instances take them from."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from penstock.errors import PenstockError
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.forming import Batch
from penstock.request import Done, InferRequest
from penstock.telemetry.statistics import BatchTimes, ModelStatistics
from penstock.tensor import Array


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
    """What an instance works for; these are called on the instance's thread."""

    @property
    def config(self) -> BatchingConfig: ...

    def take(self) -> Batch | None:
        """The next batch; blocks while there is none; None if the instance shall end."""
        ...

    def finish(self, batch: Batch, outcome: list[dict[str, Array]] | PenstockError, times: BatchTimes) -> None:
        """Give back a batch taken, or a part of it, with the outputs of each request or the error that befell all."""
        ...
