"""Requests that wait while a thread reads their large inputs from shared memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.errors import Cancelled, PenstockError
from penstock.online.repository.handle import Handle
from penstock.online.scheduler.base import Cancellable
from penstock.online.server.shared_memory.lease import Lease
from penstock.request import InferRequest

_log = logging.getLogger(__name__)

_Sequence = tuple[str, int | str]


class Arrivals:
    """The waiting requests. Requests of a sequence keep their order. Used only on the event loop."""

    def __init__(self) -> None:
        self._last: dict[_Sequence, asyncio.Task[None]] = {}
        """The last request of each sequence with waiting requests."""

    def must_wait(self, request: InferRequest) -> bool:
        """True if an input of ``request`` has not been read yet, or an earlier request of the same sequence is waiting."""
        if isinstance(request.lease, Lease) and request.lease.is_unread:
            return True
        return bool(request.sequence_id) and (request.model_name, request.sequence_id) in self._last

    def add(
        self,
        handle: Handle,
        request: InferRequest,
        submit: Callable[[], Cancellable | None],
        fail: Callable[[PenstockError], None],
    ) -> Cancellable:
        """Call ``submit`` once the inputs are read, or ``fail`` with an error. Neither is called before this method returns."""
        sequence = (request.model_name, request.sequence_id)
        before = self._last.get(sequence) if request.sequence_id else None
        arrival = _Arrival(submit, fail)
        handle.hold()
        task = asyncio.ensure_future(arrival.run(request.lease, before))
        if request.sequence_id:
            self._last[sequence] = task

        def arrived(task: asyncio.Task[None]) -> None:
            handle.release()
            if self._last.get(sequence) is task:
                del self._last[sequence]

        task.add_done_callback(arrived)
        return arrival


class _Arrival:
    """Cancels one request: ends its wait or, later, cancels the ``Cancellable`` that ``submit`` returned."""

    def __init__(self, submit: Callable[[], Cancellable | None], fail: Callable[[PenstockError], None]) -> None:
        self._submit = submit
        self._fail = fail
        self._is_over = False
        self._submitted: Cancellable | None = None

    def cancel(self) -> None:
        if self._submitted is not None:
            self._submitted.cancel()
        else:
            self._end(Cancelled("the request was cancelled"))

    async def run(self, lease: object, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            if isinstance(lease, Lease):
                await lease.fill()
        except PenstockError as error:
            self._end(error)
        except Exception:  # noqa: BLE001 - a bug must not leave the client unanswered
            _log.exception("the inputs could not be read")
            self._end(PenstockError("internal error"))
        if not self._is_over:
            self._is_over = True
            self._submitted = self._submit()

    def _end(self, error: PenstockError) -> None:
        if not self._is_over:
            self._is_over = True
            self._fail(error)
