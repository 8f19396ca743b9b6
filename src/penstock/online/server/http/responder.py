"""The write side of an HTTP/1.1 connection: requests in progress, and their responses in request order.

A response is written immediately. On a pipelined connection, all responses of the same event-loop iteration are written together.
Connections take turns. At the end of its turn, a connection stops reading, and keeps unprocessed data and requests for its next turn.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import cast

from penstock.online.server.http.answer import (
    CLOSE,
    CONTINUE,
    KEEP_ALIVE,
    LAST_CHUNK,
    Answer,
    compose,
    compose_chunk,
    compose_small,
    compose_stream,
    without_body,
)
from penstock.online.server.http.body_gate import BodyGate
from penstock.online.server.http.context import HttpContext
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.network.connections import LAST_REQUEST_S, ServerConnection, end_sending, has_left
from penstock.online.server.network.outgoing import SMALL_BYTES, Outgoing
from penstock.online.server.network.turns import BYTES_A_UNIT, UNIT_S
from penstock.online.server.network.unread import Unread
from penstock.tensor import Buffer

_PROBE_S = 0.05
_UNREAD_FACTOR = 4
_SMALL_BODY_BYTES = SMALL_BYTES - (4 << 10)
"""A response with a body of at most this size has at most ``SMALL_BYTES``, except for CORS headers."""


class Responder(ServerConnection):
    """The write side of one HTTP/1.1 connection: queues responses and sends them in request order. Used only on the event loop."""

    __slots__ = (
        "_backlog",
        "_discarding",
        "_ending",
        "_flushing",
        "_gate",
        "_held",
        "_is_half_closed",
        "_is_last_written",
        "_is_queued",
        "_outgoing",
        "_pending",
        "_receiving",
        "_transport",
        "_unparsed",
        "_unread",
        "_until",
        "_waiting",
        "_window",
        "_write_paused",
        "context",
    )

    def __init__(self, context: HttpContext) -> None:
        self.context = context
        self._transport: asyncio.Transport | None = None
        self._pending: deque[Exchange] = deque()
        self._backlog: deque[Exchange] = deque()
        self._flushing = False
        self._outgoing = Outgoing(context.connections.turns, self._all_written)
        self._unread = Unread(context.unread, self._evict, self._outgoing.read)
        self._is_last_written = False  # the connection closes once everything is written
        self._write_paused = False  # responses wait, in ``_outgoing`` or in the transport
        self._window = 1  # requests that may be in flight; 1 until the size of the first response is known
        self._waiting = 0  # bytes of complete responses that wait for earlier responses
        self._held = 0  # bytes of responses reserved in the server's budget
        self._is_half_closed = False
        self._gate = BodyGate()  # holds back large bodies before they are received
        self._is_queued = False  # the connection waits for its turn
        self._until = 0.0  # the end of the connection's turn; 0 outside of a turn
        self._unparsed = b""  # received data that waits for the connection's turn or for the backlog
        self._receiving = False  # part of a request has arrived
        self._ending = False  # no further request is accepted
        self._discarding = False  # received bytes are dropped

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._outgoing.open(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        # Batches that are already running continue, but their responses are dropped.
        self._transport = None
        self._ending = True
        self._unparsed = b""
        self._drop_unread()
        self._unread.close()
        for exchange in self._backlog:
            self._give_back(exchange)
        self._backlog.clear()
        pending, self._pending = self._pending, deque()
        for exchange in pending:
            exchange.cancel()
        self.context.connections.discard(self)

    def eof_received(self) -> bool:
        """The client has stopped sending. It may have disconnected, or may still be waiting for responses."""
        self._ending = True
        self._discarding = False
        if not (self._pending or self._backlog):
            return self._outgoing.is_busy
        self._is_half_closed = True
        self._probe()
        asyncio.get_running_loop().call_later(_PROBE_S, self._probe)
        return True

    def _look_for_client(self) -> None:
        """Detect that the client has disconnected, or may have disconnected, while the connection is not reading."""
        if (
            self._transport is not None
            and (self._unparsed or self._is_full or self._gate.is_closed)
            and not self._write_paused
        ):
            left = has_left(self._transport)
            if left:
                self._transport.abort()
            elif left is None:
                self._is_half_closed = True
        self._probe()

    def _probe(self) -> None:
        """Send an interim response, which every client must accept. If the client has disconnected, it resets the connection.

        The next write then fails, which reveals that the client has disconnected.
        """
        if self._transport is None or not (self._is_half_closed and self._pending):
            return
        first = self._pending[0]
        if not (first.head.http_1_0 or first.is_streaming or self._flushing):
            self._outgoing.write((CONTINUE,))

    def pause_writing(self) -> None:
        self._write_paused = True
        self._outgoing.pause()
        self._steer_reading()

    def resume_writing(self) -> None:
        self._outgoing.resume()
        self._count_unread()

    def _all_written(self) -> None:
        self._write_paused = False
        self._count_unread()
        if self._is_last_written or self._is_over:
            self._close()
        else:
            self._continue()

    @property
    def _is_over(self) -> bool:
        """True if all requests are answered and no further request is accepted."""
        is_done = not (self._pending or self._backlog or ((self._receiving or self._unparsed) and not self._ending))
        return is_done and (self._ending or self.context.connections.draining)

    # Requests

    def _take(self, exchange: Exchange) -> None:
        """Run ``exchange`` now. If too many requests are in flight, run it later."""
        if self._backlog or self._write_paused or len(self._pending) >= self._window:
            self._backlog.append(exchange)
            self._steer_reading()
        else:
            self._pending.append(exchange)
            exchange.run()

    def _begin_turn(self, units: int) -> float:
        """Start a turn of ``units`` time units. Returns the current time."""
        now = perf_counter()
        self._until = now + units * UNIT_S
        return now

    def _end_turn(self, begun: float) -> int:
        """End the turn. Returns the number of time units used."""
        self._until = 0.0
        return int((perf_counter() - begun) / UNIT_S) + 1

    @property
    def _is_late(self) -> bool:
        """True if the turn's time is used up."""
        return self._until > 0 and perf_counter() >= self._until

    @property
    def _is_full(self) -> bool:
        return bool(self._backlog) and len(self._pending) + len(self._backlog) >= self.context.max_pipelined

    def _continue(self) -> None:
        """Queue the connection for its next turn if waiting requests or data can be processed."""
        is_able = len(self._pending) < self._window if self._backlog else bool(self._unparsed)
        if is_able and not (self._is_queued or self._write_paused or self._transport is None):
            self._is_queued = True
            self.context.connections.turns.add(self)
        self._steer_reading()

    def _charge(self, received: int) -> None:
        """Charge ``received`` bytes. If they exceed the current turn, continue reading in a later turn.

        Otherwise, the transport would read for as long as the client keeps sending.
        """
        turns, transport = self.context.connections.turns, self._transport
        turns.spend(1 + received // BYTES_A_UNIT)
        if turns.left < 0 and not (transport is None or transport.is_closing() or self._is_queued):
            transport.pause_reading()
            self._is_queued = True
            turns.add(self)

    def work(self, units: int) -> int:
        """See ``TurnTaker``."""
        self._is_queued = False
        begun = self._begin_turn(units)
        self._take_backlog()
        if self._unparsed and not self._is_full and not self._write_paused:
            data, self._unparsed = self._unparsed, b""
            self._parse(data)
        used = self._end_turn(begun)
        self._continue()
        return used

    @abstractmethod
    def _parse(self, data: bytes) -> None:
        """Run the requests in ``data``. Data that exceeds the time or the limits stays in ``_unparsed``."""

    def _take_backlog(self) -> None:
        while self._backlog and not (self._write_paused or len(self._pending) >= self._window or self._is_late):
            exchange = self._backlog.popleft()
            self._pending.append(exchange)
            answer, exchange.answer = exchange.answer, None
            if answer is None:
                exchange.run()
            else:
                self._settle(exchange, answer)

    def _answer_later(self, exchange: Exchange, answer: Answer) -> None:
        """Queue a ready response after the responses to all earlier requests."""
        if self._backlog:
            exchange.answer = answer
            self._backlog.append(exchange)
        else:
            self._pending.append(exchange)
            self._settle(exchange, answer)

    def _steer_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._write_paused or self._unparsed or self._is_full or self._gate.is_closed:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # AnswerSink

    def answered(
        self, exchange: Exchange, status: int, headers: bytes, body: bytes, tensors: Sequence[Buffer] = ()
    ) -> None:
        if exchange.reserved_bytes or exchange.passage is not None:
            self._give_back(exchange)
        transport = self._transport
        if transport is None:
            return
        head, context = exchange.head, self.context
        draining = context.connections.draining
        self._window = context.max_pipelined
        if (
            len(self._pending) == 1
            and head.is_usual
            and exchange.keep_alive
            and not (self._ending or draining or self._backlog or self._flushing or self._write_paused)
            and not tensors
            and len(body) <= _SMALL_BODY_BYTES
        ):
            # Fast path for the common case, equivalent to the rest.
            self._pending.popleft()
            transport.write(compose_small(status, headers, body))
            return
        if not exchange.keep_alive or (
            draining and self._pending[-1] is exchange and not (self._backlog or self._receiving or self._unparsed)
        ):
            exchange.keep_alive = False
            self._ending = True
            connection = CLOSE
        else:
            connection = KEEP_ALIVE if head.http_1_0 else b""
        answer = compose(status, headers + head.cors, connection, body, tensors)
        if head.method == b"HEAD":
            answer = without_body(answer)
        size = _size(answer)
        if size > SMALL_BYTES and not self._reserve(size):
            exchange.fail(context.budget.refusal())
            return
        # The next responses are probably as large as this one.
        self._window = max(1, min(self._window, context.config.max_unsent_bytes // max(1, size)))
        self._settle(exchange, answer)

    def begin_stream(self, exchange: Exchange, headers: bytes) -> None:
        is_chunked = not exchange.head.http_1_0
        exchange.keep_alive = exchange.keep_alive and is_chunked
        exchange.is_streaming = True
        headers += exchange.head.cors
        self._push(exchange, compose_stream(headers, b"" if exchange.keep_alive else CLOSE, is_chunked))

    def send(self, exchange: Exchange, data: bytes) -> None:
        self._push(exchange, data if exchange.head.http_1_0 else compose_chunk(data))
        if self._transport is None:
            return
        self._count_unread()
        unsent = self._outgoing.unsent + (_size(exchange.answer) if exchange.answer else 0)
        if unsent > self.context.config.max_unsent_bytes:
            self._transport.abort()
            exchange.cancel()

    def end_stream(self, exchange: Exchange) -> None:
        self._give_back(exchange)
        if self._transport is None:
            return
        exchange.is_streaming = False
        self._window = self.context.max_pipelined
        if exchange.answer is None:
            self._settle(exchange, b"" if exchange.head.http_1_0 else LAST_CHUNK)
            return
        if not exchange.head.http_1_0:
            self._wait(exchange, LAST_CHUNK)
        self._settle(exchange, exchange.answer)

    def _push(self, exchange: Exchange, data: bytes) -> None:
        if self._transport is None:
            return
        if self._pending[0] is exchange and not self._flushing:
            self._hand_over((data,))
        else:
            self._wait(exchange, data)

    def _wait(self, exchange: Exchange, data: bytes) -> None:
        """Append a piece of a streamed response to a buffer. The buffer is sent after all earlier responses."""
        if exchange.answer is None:
            exchange.answer = [bytearray()]
        cast(bytearray, exchange.answer[0]).extend(data)
        self._waiting += len(data)

    def _give_back(self, exchange: Exchange) -> None:
        self.context.give_back(exchange.reserved_bytes)
        exchange.reserved_bytes = 0
        if exchange.passage is not None:
            exchange.passage.leave()
            exchange.passage = None

    def _settle(self, exchange: Exchange, answer: Answer) -> None:
        if len(self._pending) == 1 and not self._backlog and not self._flushing:
            self._pending.popleft()
            self._write([answer] if isinstance(answer, bytes) else answer, exchange)
            return
        if exchange.answer is None:
            exchange.answer = answer
            self._waiting += _size(answer)
            self._count_unread()
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Write all responses that are due in one call, then process the backlog."""
        answers: list[Buffer] = []
        last = None
        while self._pending and (answer := self._pending[0].answer) is not None:
            last = self._pending[0]
            if isinstance(answer, bytes):
                answers.append(answer)
            else:
                answers += answer
            self._waiting -= _size(answer)
            if last.is_streaming:
                last.answer = None
                break
            self._pending.popleft()
        self._flushing = False
        if last is not None:
            self._write(answers, last)
        self._continue()

    def _write(self, parts: Sequence[Buffer], last: Exchange) -> None:
        if self._transport is None:
            return
        self._hand_over(parts)
        if last.is_streaming:
            return
        self._count_unread()
        if not last.keep_alive or self._is_over:
            self._is_last_written = True
            if not self._outgoing.is_busy:
                self._close()

    def _hand_over(self, parts: Sequence[Buffer]) -> None:
        self._outgoing.write(parts)
        if self._outgoing.is_busy and not self._write_paused:
            self._write_paused = True
            self._steer_reading()

    def _reserve(self, size: int) -> bool:
        """Reserve memory for a response that the client may leave unread. Returns False if there is too little memory."""
        self.context.unread.has_room(size, self._unread)
        if not self.context.budget.take(size):
            return False
        self._held += size
        return True

    def _drop_unread(self) -> None:
        self._outgoing.close()
        self.context.give_back(self._held)
        self._held = self._unread.count = 0

    def _evict(self) -> None:
        """Disconnect the client, because it reads nothing while others need the memory of its responses."""
        self._drop_unread()
        self.abort()

    def _count_unread(self) -> None:
        """Reserve the size of unread responses in the server's budget. Disconnect the client if it leaves too much unread."""
        if self._transport is None:
            return
        unread = self._waiting + self._outgoing.kept
        size = unread if unread > SMALL_BYTES else 0
        limit = _UNREAD_FACTOR * self.context.config.max_unsent_bytes
        if size <= self._held:
            self.context.give_back(self._held - size)
        elif (size > limit and len(self._pending) > 1) or not self.context.budget.take(size - self._held):
            size = self._held
            self._transport.abort()
        self._held = size
        if size or self._unread.count:
            self._unread.count = size
            self._unread.settle()

    def _close(self) -> None:
        """Close after the last response. If the client may still be sending, close after a delay, so that the response arrives."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not (self._discarding or self.context.connections.draining):
            transport.close()
            return
        is_told = end_sending(transport)
        if not (self._discarding and is_told):
            # The client may have sent another request before it received the last response.
            asyncio.get_running_loop().call_later(LAST_REQUEST_S, transport.close)

    # Called by the server

    def begin_drain(self) -> None:
        """Do nothing, because the next response has the header ``Connection: close``."""

    def close_if_idle(self) -> None:
        """Close the connection unless a request is being received or answered."""
        if not self._receiving:
            self.make_room()

    def make_room(self) -> bool:
        is_answering = self._pending or self._backlog or self._unparsed or self._outgoing.is_busy
        if self._transport is None or is_answering or (self._receiving and self.requests):
            return False
        self._transport.close()
        return True

    def abort(self) -> None:
        """Close the connection immediately, even if requests are in flight."""
        if self._transport is not None:
            self._transport.abort()


def _size(answer: Answer) -> int:
    return len(answer) if isinstance(answer, bytes) else sum(map(len, answer))
