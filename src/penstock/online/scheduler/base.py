"""The interface of schedulers. A scheduler queues the requests of one model version."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from penstock.errors import PenstockError
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.request import Done, InferRequest
from penstock.telemetry.statistics import ModelStatistics


class InstanceDied(PenstockError):
    """The model's process ended during a batch. The batch is not retried, because any of its requests may be the cause."""


class Cancellable(Protocol):
    """A request that a scheduler has accepted."""

    def cancel(self) -> object:
        """Cancel the request, on the event loop. Unless the request has ended, this calls ``done`` with Cancelled.

        Idempotent.
        """
        ...


class Scheduler(Protocol):
    """Queues and runs requests, on the event loop. Every request ends exactly once: with a result, an error, or Cancelled."""

    @property
    def config(self) -> BatchingConfig: ...

    @property
    def statistics(self) -> ModelStatistics: ...

    def submit(self, request: InferRequest, rows: int, key: Hashable, done: Done) -> Cancellable | None:
        """Accept ``request``, for which the input check returned ``rows`` and ``key``.

        ``done`` is called on the event loop, after this method has returned. The result is None if the request cannot be cancelled.
        Raises PenstockError if the request is rejected. A rejected request is counted as failed, and ``done`` is not called.
        """
        ...

    def hurry(self) -> None:
        """From now on, never delay a batch to wait for further requests."""
        ...

    async def drain(self) -> None:
        """Wait until every request has ended."""
        ...

    def stop(self) -> None:
        """Reject further requests. Instances end when the queue is empty."""
        ...
