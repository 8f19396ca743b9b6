"""The closed and the open loop of a load test: they manage connections, send times, and the phases of a run.

Each request is counted exactly once, as answered or as one kind of error. A failed connection is replaced.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import perf_counter
from typing import Protocol

import msgspec

from penstock.errors import InvalidArgument, Unavailable
from penstock.perf.http_client import Address, AnswerHead
from penstock.perf.pacing import PreciseTimer
from penstock.perf.tally import Tally

Check = Callable[[int, bytes, int | None], bool]
"""Called for each response with ``(request index, body, json_size)``. Returns True if the response is correct. Must be fast."""

TIMED_OUT = "time-out"
NO_CONNECTION = "no connection"
WRONG = "wrong answer"

_RETRY_S = 0.05


class LoadConnection(Protocol):
    """The common interface of ``HttpConnection`` and ``grpc_client.Lane``, which carry one request at a time."""

    busy: bool
    started: float
    sent: float
    index: int

    def send(self, request: bytes, index: int, started: float, now: float) -> None: ...
    def body(self) -> bytes: ...
    def drop(self, why: str) -> None: ...


Connect = Callable[
    [Address, Callable[[LoadConnection, AnswerHead], None], Callable[[LoadConnection, str], None]],
    Awaitable[LoadConnection],
]
"""Opens a connection with ``(address, on_answer, on_lost)``. Raises Unavailable."""


class Target(msgspec.Struct, frozen=True):
    """The server and the requests of a load."""

    address: Address
    requests: Sequence[bytes]
    """Complete requests in the form that ``connect`` requires, sent in rotation."""
    connect: Connect


class LoadWindow(msgspec.Struct, frozen=True):
    """Duration and limits of a measurement."""

    duration_s: float | None = 5.0
    """Length of the measured window in seconds. If None, the window lasts until ``max_requests`` requests are done."""
    warmup_s: float = 1.0
    """Seconds of unmeasured load before the window."""
    timeout_s: float = 10.0
    """Maximum seconds to wait for a response, also after the end of the window. A later response counts as an error."""
    max_requests: int | None = None
    """Number of requests after which the window ends (closed loop only)."""


class Loop(abc.ABC):
    """Base of both loops: connections, warm-up, window and drain."""

    def __init__(self, target: Target, max_connections: int, window: LoadWindow, check: Check | None) -> None:
        if not target.requests:
            raise InvalidArgument("there are no requests to send")
        self.window = window
        self.max_connections = max_connections
        self.most_connections = 0
        self.tally = Tally()
        self._connections: set[LoadConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._busy = 0  # connections with a request in flight
        self._target = target
        self._requests = target.requests
        self._indices = itertools.cycle(range(len(target.requests)))
        self._check = check
        self._done = asyncio.Event()

    # Differences between the loops.

    @abc.abstractmethod
    def _has_more(self) -> bool:
        """True if a request is waiting or is still to be scheduled."""

    @abc.abstractmethod
    def _next(self, connection: LoadConnection, now: float) -> None:
        """Send the next request on a free connection, or mark it as idle."""

    def _connected(self, connection: LoadConnection) -> None:
        self._busy += 1
        self._next(connection, perf_counter())

    @abc.abstractmethod
    def _disconnected(self, connection: LoadConnection) -> None:
        """Replace a lost connection if necessary."""

    @abc.abstractmethod
    def _not_connected(self) -> None:
        """Count the request that waits for the connection as failed."""

    @abc.abstractmethod
    async def _start(self) -> None:
        """Connect and start sending. Raises Unavailable if no server listens."""

    @abc.abstractmethod
    async def _measure(self) -> None:
        """Wait until the window ends."""

    @abc.abstractmethod
    def _stop(self) -> None:
        """Stop producing requests."""

    def _give_up(self) -> None:
        """Count unanswered requests as timed out."""
        for connection in self._connections:
            if connection.busy:
                connection.busy = False
                self.tally.failed(TIMED_OUT, connection.started)

    # The phases of a run.

    async def run(self) -> None:
        """Warm up, measure, and await late responses. Raises Unavailable if no server listens at the start."""
        sweeper = asyncio.create_task(self._sweep())
        try:
            await self._start()
            await self._measure()
            self.tally.close_window(perf_counter())
            self._stop()
            if self._busy or self._has_more():
                self._done.clear()
                await self._until_done(self.window.timeout_s)
            self._give_up()
        finally:
            self._stop()
            for task in (sweeper, *self._connecting):
                task.cancel()
            for connection in tuple(self._connections):
                connection.drop(TIMED_OUT)
            while self._connections:
                await asyncio.sleep(0)  # connections close in the next iteration of the event loop

    async def _until_done(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        except TimeoutError:
            pass

    async def _sweep(self) -> None:
        """Drop connections whose request has timed out."""
        while True:
            await asyncio.sleep(self.window.timeout_s / 10)
            latest = perf_counter() - self.window.timeout_s
            for connection in tuple(self._connections):
                if connection.busy and connection.sent < latest:
                    connection.drop(TIMED_OUT)

    def _finish_if_done(self) -> None:
        if not self._busy and not self._has_more():
            self._done.set()

    # The hot path.

    def _send(self, connection: LoadConnection, started: float, now: float) -> None:
        index = next(self._indices)
        connection.send(self._requests[index], index, started, now)

    def _on_answer(self, connection: LoadConnection, head: AnswerHead) -> None:
        now = perf_counter()
        if head.status != 200:
            self.tally.failed(f"{head.protocol} {head.status}", connection.started, connection.body())
        elif self._check is not None and not self._check(connection.index, connection.body(), head.json_size):
            self.tally.failed(WRONG, connection.started)
        else:
            self.tally.answered(connection.started, now)
        if head.close:
            self._busy -= 1
            connection.drop("")  # a new connection replaces it
        else:
            self._next(connection, now)

    # Connections.

    def _connect(self) -> asyncio.Task[None]:
        """Connect in the background."""
        task = asyncio.create_task(self._keep_connecting())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    async def _keep_connecting(self) -> None:
        while self._has_more():
            try:
                connection = await self._target.connect(self._target.address, self._on_answer, self._on_lost)
            except Unavailable:
                if not self.most_connections:
                    raise  # at the start, no server listens
                self._not_connected()
                self._finish_if_done()
                await asyncio.sleep(_RETRY_S)
            else:
                self._connections.add(connection)
                self.most_connections = max(self.most_connections, len(self._connections))
                self._connected(connection)
                return

    def _on_lost(self, connection: LoadConnection, why: str) -> None:
        self._connections.discard(connection)
        if connection.busy:
            self._busy -= 1
            self.tally.failed(why, connection.started)
        self._disconnected(connection)
        self._finish_if_done()


class ClosedLoop(Loop):
    """Each connection sends its next request after the response to its last request."""

    _left = sys.maxsize  # number of requests that may still be sent; limited only within the window
    _begun = False

    async def _start(self) -> None:
        await self._connect()
        others = [self._connect() for _ in range(self.max_connections - 1)]
        if others:
            await asyncio.wait(others, timeout=self.window.timeout_s)

    async def _measure(self) -> None:
        if self.window.warmup_s:
            self._begin()
            await asyncio.sleep(self.window.warmup_s)
        self._left = self.window.max_requests or sys.maxsize
        now = perf_counter()
        self.tally.count_from(now)
        self.tally.open_window(now)
        self._begin()
        await self._until_done(self.window.duration_s)

    def _begin(self) -> None:
        """Start to send on all connections at the same time."""
        if not self._begun:
            self._begun = True
            for connection in self._connections:
                super()._connected(connection)

    def _connected(self, connection: LoadConnection) -> None:
        if self._begun:
            super()._connected(connection)

    def _stop(self) -> None:
        self._left = 0

    def _has_more(self) -> bool:
        return self._left > 0

    def _next(self, connection: LoadConnection, now: float) -> None:
        if self._left:
            self._left -= 1
            self._send(connection, now, now)
        else:
            self._busy -= 1
            self._finish_if_done()

    def _disconnected(self, connection: LoadConnection) -> None:
        if self._left:
            self._connect()

    def _not_connected(self) -> None:
        if self._left:
            self._left -= 1
            self.tally.failed(NO_CONNECTION, perf_counter())


class OpenLoop(Loop):
    """Sends requests on schedule. If no connection is idle, requests wait in order."""

    def __init__(
        self, target: Target, max_connections: int, window: LoadWindow, check: Check | None, arrivals: Iterator[float]
    ) -> None:
        """``arrivals`` is an infinite iterator of ascending times, in seconds after the start of the run."""
        super().__init__(target, max_connections, window, check)
        self._arrivals = arrivals
        self._due = self._end = self._origin = 0.0
        self._idle: list[LoadConnection] = []
        self._waiting: deque[float] = deque()
        self._over = False
        self._timer: PreciseTimer | None = None

    async def _start(self) -> None:
        await self._connect()
        self._timer = PreciseTimer(self._send_due)
        self._origin = perf_counter()
        begin = self._origin + self.window.warmup_s
        self.tally.count_from(begin)
        self._end = begin + (self.window.duration_s or 0.0)
        self._due = self._origin + next(self._arrivals)
        self._send_due()

    async def _measure(self) -> None:
        await asyncio.sleep(self.window.warmup_s)
        self.tally.open_window(perf_counter())
        while (left := self._end - perf_counter()) > 0:  # the event loop's timers may be slightly early
            await asyncio.sleep(left)
        self._send_due()

    def _stop(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.close()

    def _has_more(self) -> bool:
        return not self._over or bool(self._waiting)

    def _next(self, connection: LoadConnection, now: float) -> None:
        if self._waiting:
            self._send(connection, self._waiting.popleft(), now)
            return
        self._busy -= 1
        self._idle.append(connection)
        self._finish_if_done()

    def _disconnected(self, connection: LoadConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)
        self._grow()

    def _not_connected(self) -> None:
        if self._waiting:
            self.tally.failed(NO_CONNECTION, self._waiting.popleft())

    def _give_up(self) -> None:
        super()._give_up()
        while self._waiting:
            self.tally.failed(TIMED_OUT, self._waiting.popleft())

    def _send_due(self) -> None:
        """Send all due requests, and arm the timer for the next request."""
        now = perf_counter()  # read once, so that the loop ends even if the rate is too high to send
        while self._due < min(now, self._end):
            if self._idle:
                self._busy += 1
                self._send(self._idle.pop(), self._due, now)
            else:
                self._waiting.append(self._due)
                self._grow()
            self._due = self._origin + next(self._arrivals)
        if self._due < self._end and self._timer is not None:
            self._timer.arm(self._due - now)

    def _grow(self) -> None:
        """Open another connection if a request is waiting for a connection."""
        connecting = len(self._connecting)
        if connecting < len(self._waiting) and len(self._connections) + connecting < self.max_connections:
            self._connect()
