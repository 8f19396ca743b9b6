"""The queue of one model version, emptied in batches by its instances.

Natural batching: nothing is ever waited for. What arrives while all instances are busy leaves together, as far as it
fits, when the next one is free; an idle instance starts at once with what one turn of the event loop brought.

Threads: ``submit``, ``drain`` and ``stop`` belong to the event loop, ``take`` and ``finish`` to the instances.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from queue import SimpleQueue

import msgspec

from penstock.errors import PenstockError, Unavailable
from penstock.request import Done, InferRequest, InferResponse
from penstock.tensor import Array

_log = logging.getLogger(__name__)


class BatchingConfig(msgspec.Struct, frozen=True):
    """How requests of one model version queue up and leave."""

    batchable: bool
    """Whether requests may be merged along the first axis; if not, each runs alone."""
    max_batch: int = 1
    """Most rows that are merged; a single larger request runs alone."""
    max_queue: int = 4096
    """Most requests that are accepted and not yet answered."""


class Waiting(msgspec.Struct, eq=False):
    """One request in the queue. Only those with equal ``key`` can be merged."""

    number: int
    """Counts up in the order of arrival."""
    request: InferRequest
    rows: int
    key: Hashable
    done: Done


class Formed(msgspec.Struct, frozen=True):
    """A decision: the first ``count`` requests of queue ``key`` make the next batch."""

    key: Hashable
    count: int


def form(queues: Mapping[Hashable, Sequence[Waiting] | deque[Waiting]], max_batch: int) -> Formed | None:
    """The next batch, or None to wait: the longest waiting request and those behind it that fit, in order. Pure.

    A request of more than ``max_batch`` rows runs alone. No queue is empty.
    """
    if not queues:
        return None
    key = next(iter(queues)) if len(queues) == 1 else min(queues, key=lambda key: queues[key][0].number)
    count = rows = 0
    for waiting in queues[key]:
        rows += waiting.rows
        if count and rows > max_batch:
            break
        count += 1
    return Formed(key, count)


class DynamicBatcher:
    """See the module. Every request submitted ends exactly once: with a result or an error."""

    def __init__(self, config: BatchingConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self._batchable = config.batchable
        self._max_queue = config.max_queue
        self._max_rows = config.max_batch if config.batchable else 1
        self._loop = loop
        self._arrived: list[Waiting] = []
        self._unanswered = 0
        self._submitted = 0
        self._drained = asyncio.Event()
        self._lock = threading.Lock()
        # The rest is guarded by the lock.
        self._queues: dict[Hashable, deque[Waiting]] = {}
        self._idle = 0
        self._stopped = False
        # One token per idle instance that shall look again. Its get() is one futex wait; a Condition would take three locks.
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def submit(self, request: InferRequest, rows: int, key: Hashable, done: Done) -> None:
        """Take over ``request``, already checked. Raises Unavailable, at once, if the queue is full or stopped."""
        if self._unanswered >= self._max_queue:
            raise Unavailable(f"the queue of model '{request.model_name}' is full", "try again later")
        if self._stopped:
            raise Unavailable(f"model '{request.model_name}' is being unloaded")
        self._unanswered += 1
        self._submitted += 1
        if not self._arrived:
            self._loop.call_soon(self._flush)
        self._arrived.append(Waiting(self._submitted, request, rows if self._batchable else 1, key, done))

    def take(self) -> list[Waiting] | None:
        """The next batch; blocks while there is none; None once stopped and empty."""
        while True:
            with self._lock:
                batch = self._pop()
                if batch:
                    if self._queues and self._idle:
                        self._wake()
                    return batch
                if self._stopped:
                    return None
                self._idle += 1
            self._tokens.get()

    def finish(self, batch: list[Waiting], outcome: list[dict[str, Array]] | PenstockError) -> None:
        """Give back a batch taken, or a part of it, with the outputs of each request or the error that befell all."""
        try:
            self._loop.call_soon_threadsafe(self._complete, batch, outcome)
        except RuntimeError:
            # The server was ended without waiting for this answer.
            if not self._loop.is_closed():
                raise

    async def drain(self) -> None:
        """Return when every request submitted has been answered."""
        while self._unanswered:
            self._drained.clear()
            await self._drained.wait()

    def stop(self) -> None:
        """Take no more requests; instances leave when the queue is empty."""
        self._flush()
        with self._lock:
            self._stopped = True
            while self._idle:
                self._wake()

    def _flush(self) -> None:
        """Hand over what one turn of the loop brought: one lock and at most one wake-up for all of it."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        with self._lock:
            queues = self._queues
            for waiting in arrived:
                queue = queues.get(waiting.key)
                if queue is None:
                    queue = queues[waiting.key] = deque()
                queue.append(waiting)
            if self._idle:
                self._wake()

    def _pop(self) -> list[Waiting] | None:
        formed = form(self._queues, self._max_rows)
        if formed is None:
            return None
        queue = self._queues[formed.key]
        if formed.count == len(queue):
            del self._queues[formed.key]
            return list(queue)
        return [queue.popleft() for _ in range(formed.count)]

    def _wake(self) -> None:
        self._idle -= 1
        self._tokens.put(None)

    def _complete(self, batch: list[Waiting], outcome: list[dict[str, Array]] | PenstockError) -> None:
        self._unanswered -= len(batch)
        for index, waiting in enumerate(batch):
            try:
                waiting.done(
                    outcome if isinstance(outcome, PenstockError) else _response(waiting.request, outcome[index])
                )
            except Exception:  # noqa: BLE001 - a receiver's bug must not keep the others' answers from them
                _log.exception("a receiver failed")
        if not self._unanswered:
            self._drained.set()


def _response(request: InferRequest, outputs: dict[str, Array]) -> InferResponse:
    if request.outputs:
        outputs = {name: outputs[name] for name in request.outputs}
    return InferResponse(request.model_name, request.model_version, outputs, request.id)
