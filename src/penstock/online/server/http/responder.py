"""The write side of an HTTP/1.1 connection: requests in progress, and their responses in request order.

A response is written at once, or, on a pipelined connection, together with the others of the same event-loop iteration.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import cast

from penstock.online.server.http.answer import (
    CLOSE,
    CONTINUE,
    KEEP_ALIVE,
    LAST_CHUNK,
    Answer,
    compose,
    compose_chunk,
    compose_stream,
)
from penstock.online.server.http.context import HttpContext
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.network.connections import LAST_REQUEST_S, ServerConnection, end_sending
from penstock.tensor import Buffer

_PROBE_S = 0.05


class Responder(ServerConnection):
    """The write side of one HTTP/1.1 connection: queues responses and sends them in request order. Belongs to the event loop."""

    __slots__ = (
        "_backlog",
        "_discarding",
        "_ending",
        "_flushing",
        "_is_half_closed",
        "_pending",
        "_receiving",
        "_transport",
        "_write_paused",
        "context",
    )

    def __init__(self, context: HttpContext) -> None:
        self.context = context
        self._transport: asyncio.Transport | None = None
        self._pending: deque[Exchange] = deque()
        self._backlog: deque[Exchange] = deque()
        self._flushing = False
        self._write_paused = False
        self._is_half_closed = False
        self._receiving = False  # part of a request has arrived
        self._ending = False  # no further request is accepted
        self._discarding = False  # received bytes are dropped

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        # Batches that are already running continue; their responses are dropped.
        self._transport = None
        self._ending = True
        for exchange in self._backlog:
            self._give_back(exchange)
        self._backlog.clear()
        for exchange in list(self._pending):
            exchange.cancel()
        self.context.connections.discard(self)

    def eof_received(self) -> bool:
        """The client has stopped sending. It may still wait for responses, or have left."""
        self._ending = True
        self._discarding = False
        if not (self._pending or self._backlog):
            return False
        self._is_half_closed = True
        self._probe()
        asyncio.get_running_loop().call_later(_PROBE_S, self._probe)
        return True

    def _probe(self) -> None:
        """Send an interim response, which every client must accept: a client that has left resets the connection.

        The reset is noticed with the next write.
        """
        if self._transport is None or not (self._is_half_closed and self._pending):
            return
        first = self._pending[0]
        if not (first.head.http_1_0 or first.is_streaming or self._flushing):
            self._transport.write(CONTINUE)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._steer_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._take_backlog()

    # Requests

    def _take(self, exchange: Exchange) -> None:
        """Run ``exchange`` now, or once fewer requests are in flight."""
        if self._backlog or self._write_paused or len(self._pending) >= self.context.max_pipelined:
            self._backlog.append(exchange)
            self._steer_reading()
        else:
            self._pending.append(exchange)
            exchange.run()

    def _take_backlog(self) -> None:
        context = self.context
        while self._backlog and not self._write_paused and len(self._pending) < context.max_pipelined:
            exchange = self._backlog.popleft()
            self._pending.append(exchange)
            if exchange.answer is None:
                exchange.run()
            else:
                self._settle(exchange, exchange.answer)
        self._steer_reading()

    def _answer_later(self, exchange: Exchange, answer: Answer) -> None:
        """Queue a response that is already known behind those of all earlier requests."""
        if self._backlog:
            exchange.answer = answer
            self._backlog.append(exchange)
        else:
            self._pending.append(exchange)
            self._settle(exchange, answer)

    def _steer_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._backlog or self._write_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # AnswerSink

    def answered(
        self, exchange: Exchange, status: int, headers: bytes, body: bytes, tensors: Sequence[Buffer] = ()
    ) -> None:
        if exchange.reserved_bytes:
            self._give_back(exchange)
        transport = self._transport
        if transport is None:
            return
        draining = self.context.connections.draining
        if not exchange.keep_alive or (
            draining and self._pending[-1] is exchange and not (self._backlog or self._receiving)
        ):
            exchange.keep_alive = False
            self._ending = True
            connection = CLOSE
        else:
            connection = KEEP_ALIVE if exchange.head.http_1_0 else b""
        answer = compose(status, headers + exchange.head.cors, connection, body, tensors)
        if (
            len(self._pending) == 1
            and not connection
            and not self._ending
            and not self._backlog
            and not self._flushing
            and type(answer) is bytes
        ):
            # The common case, equivalent to ``_settle`` but faster.
            self._pending.popleft()
            transport.write(answer)
            return
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
        unsent = self._transport.get_write_buffer_size() + (len(_waiting(exchange)) if exchange.answer else 0)
        if unsent > self.context.config.max_unsent_bytes:
            self._transport.abort()
            exchange.cancel()

    def end_stream(self, exchange: Exchange) -> None:
        self._give_back(exchange)
        if self._transport is None:
            return
        exchange.is_streaming = False
        if exchange.answer is None:
            self._settle(exchange, b"" if exchange.head.http_1_0 else LAST_CHUNK)
            return
        if not exchange.head.http_1_0:
            _waiting(exchange).extend(LAST_CHUNK)
        self._settle(exchange, exchange.answer)

    def _push(self, exchange: Exchange, data: bytes) -> None:
        if self._transport is None:
            return
        if self._pending[0] is exchange and not self._flushing:
            self._transport.write(data)
        else:
            _waiting(exchange).extend(data)

    def _give_back(self, exchange: Exchange) -> None:
        self.context.give_back(exchange.reserved_bytes)
        exchange.reserved_bytes = 0

    def _settle(self, exchange: Exchange, answer: Answer) -> None:
        if len(self._pending) == 1 and not self._backlog and not self._flushing:
            self._pending.popleft()
            self._write([answer] if isinstance(answer, bytes) else answer, exchange)
            return
        exchange.answer = answer
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Write all responses that are due in one call, then continue with the backlog."""
        answers: list[Buffer] = []
        last = None
        while self._pending and (answer := self._pending[0].answer) is not None:
            last = self._pending[0]
            if isinstance(answer, bytes):
                answers.append(answer)
            else:
                answers += answer
            if last.is_streaming:
                last.answer = None
                break
            self._pending.popleft()
        self._flushing = False
        if last is not None:
            self._write(answers, last)
        self._take_backlog()

    def _write(self, parts: Sequence[Buffer], last: Exchange) -> None:
        transport = self._transport
        if transport is None:
            return
        if all(type(part) is bytes for part in parts):
            transport.write(b"".join(parts))
        else:
            transport.writelines(parts)
        if last.is_streaming:
            return
        is_done = not (self._pending or self._backlog or (self._receiving and not self._ending))
        if not last.keep_alive or (is_done and (self._ending or self.context.connections.draining)):
            self._close(transport)

    def _close(self, transport: asyncio.Transport) -> None:
        """Close after the last response, with a delay if the client may still be sending, so that the response arrives."""
        if not (self._discarding or self.context.connections.draining):
            transport.close()
            return
        is_told = end_sending(transport)
        if not (self._discarding and is_told):
            # The client may have sent another request before it received the last response.
            asyncio.get_running_loop().call_later(LAST_REQUEST_S, transport.close)

    # Called by the server

    def begin_drain(self) -> None:
        """No effect: the next response carries ``Connection: close``."""

    def close_if_idle(self) -> None:
        """Close the connection unless a request is being received or answered."""
        if self._transport is not None and not (self._pending or self._backlog or self._receiving):
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, even with requests in flight."""
        if self._transport is not None:
            self._transport.abort()


def _waiting(exchange: Exchange) -> bytearray:
    """The pieces of a stream that wait for earlier responses, joined in a buffer."""
    if exchange.answer is None:
        exchange.answer = [bytearray()]
    return cast(bytearray, exchange.answer[0])
