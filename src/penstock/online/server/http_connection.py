"""One HTTP/1.1 connection, an asyncio protocol of our own: this path decides how many requests a core serves.

It parses with httptools, looks only at the headers that it needs, and answers in the order of asking. An answer is
written at once, or, on a pipelined connection, together with the others of the same turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

import httptools

from penstock.online.server.config import ServerConfig
from penstock.online.server.connections import LAST_REQUEST_S, Connections, ServerConnection
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http_answer import CLOSE, CONTINUE, JSON, KEEP_ALIVE, compose
from penstock.online.server.http_exchange import Exchange
from penstock.online.server.oip import encode_error
from penstock.online.server.routes import Routes

_HEADER_OVERHEAD = 32
_LINGER_S = 2.0


class Shared:
    """What all connections of one server have in common."""

    def __init__(self, dataplane: DataPlane, config: ServerConfig, connections: Connections) -> None:
        self.dataplane = dataplane
        self.config = config
        self.routes = Routes()
        self.connections = connections
        # Looked up for every request, so each is one step away.
        self.max_pipelined = config.max_pipelined
        self.max_header_bytes = config.max_header_bytes
        self.max_request_bytes = config.max_request_bytes
        self.limit_digits = len(str(config.max_request_bytes))


class _Refused(Exception):
    """Raised out of the parser's callbacks to end parsing; the answer is already on its way."""


class Connection(ServerConnection):
    """One client. ``on_*`` are called by the parser."""

    __slots__ = (
        "_backlog",
        "_body",
        "_body_bytes",
        "_chunked",
        "_compressed",
        "_discarding",
        "_ending",
        "_flushing",
        "_header_bytes",
        "_http_1_0",
        "_json_length",
        "_messages",
        "_overhead_bytes",
        "_parser",
        "_pending",
        "_progressed",
        "_seen",
        "_shared",
        "_since",
        "_transport",
        "_url",
        "_write_paused",
    )

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[Exchange] = deque()
        self._backlog: deque[Exchange] = deque()
        self._http_1_0 = False
        self._flushing = False
        self._write_paused = False
        self._ending = False  # no request after the present ones is taken
        self._discarding = False  # what still comes in is thrown away
        self._progressed = False  # the bytes just received brought a request forward
        self._messages = 0
        self._seen: tuple[int, bool, bool, int] | None = None
        self._since = 0.0
        self._url = b""
        self._body: bytes | bytearray = b""
        self._json_length: int | None = None
        self._begin_message()

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        if not self._shared.connections.add(self):
            self._refuse(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        # Requests in flight run on; their answers find no transport and are dropped.
        self._transport = None
        self._ending = True
        self._backlog.clear()
        self._shared.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        self._progressed = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._ending:
                self._refuse(400, f"malformed HTTP: {error}")
        if not self._progressed and not self._ending:
            self._check_overhead(len(data))

    def eof_received(self) -> bool:
        """The client has said all that it will; it may still wait for answers."""
        self._ending = True
        self._discarding = False  # nothing more comes in
        return bool(self._pending or self._backlog)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._steer_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._take_backlog()

    # The parser's side

    def on_url(self, url: bytes) -> None:
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name)
        self._header_bytes += size + len(value) + _HEADER_OVERHEAD
        if self._chunked:
            return  # a trailer, which may not stand for a header
        if size == 14:
            # The parser checks that it is a number; one with fewer digits than the limit need not be read.
            if len(value) >= self._shared.limit_digits and name.lower() == b"content-length":
                self._check_body(int(value))
        elif size == 31:
            if name.lower() == b"inference-header-content-length":
                self._json_length = self._count(value)
        elif size == 16:
            if name.lower() == b"content-encoding":
                self._compressed = value.lower() != b"identity"
        elif size == 6 and name.lower() == b"expect" and value.lower() == b"100-continue":
            # An exchange of its own, so that it keeps its place behind the answers of earlier requests.
            self._answer_later(Exchange(self.answered, keep_alive=True), CONTINUE)

    def on_chunk_header(self) -> None:
        self._chunked = True

    def on_body(self, data: bytes) -> None:
        self._progressed = True
        if not self._body:
            self._body = data
            self._body_bytes = len(data)
        else:
            # Grown in place, so that a body in many small pieces takes no more memory than its size.
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data
            self._body_bytes += len(data)
        if self._body_bytes > self._shared.max_request_bytes:
            self._check_body(self._body_bytes)

    def on_message_complete(self) -> None:
        if self._ending:
            return
        self._progressed = True
        self._messages += 1
        if self._messages == 1:
            self._http_1_0 = self._parser.get_http_version() == "1.0"
        shared = self._shared
        if self._header_bytes + len(self._url) > shared.max_header_bytes:
            self._refuse_head()
            raise _Refused
        parser = self._parser
        if parser.should_upgrade():
            # The parser keeps the body of such a request to itself, so it cannot be answered as if nothing had been asked.
            self._refuse(501, "changing the protocol is not supported: ask without the header Upgrade")
            raise _Refused
        keep_alive = parser.should_keep_alive()
        self._ending = not keep_alive
        exchange = Exchange(
            self.answered, keep_alive, parser.get_method(), self._url, self._body, self._json_length, self._compressed
        )
        self._begin_message()
        if self._backlog or self._write_paused or len(self._pending) >= shared.max_pipelined:
            self._backlog.append(exchange)
            self._steer_reading()
        else:
            self._pending.append(exchange)
            exchange.run(shared.routes[exchange.url], shared.dataplane)

    def _begin_message(self) -> None:
        self._url = b""
        self._body = b""
        self._body_bytes = 0
        self._header_bytes = 0
        self._overhead_bytes = 0
        self._json_length = None
        self._compressed = False
        self._chunked = False

    # Answers

    def answered(self, exchange: Exchange, status: int, headers: bytes, body: bytes) -> None:
        """``exchange`` has its answer; write it in its turn."""
        if not exchange.keep_alive or (self._shared.connections.draining and self._is_last(exchange)):
            exchange.keep_alive = False
            self._ending = True
            connection = CLOSE
        else:
            connection = KEEP_ALIVE if self._http_1_0 else b""
        answer = compose(status, headers, connection, body)
        if not connection and not self._ending and len(self._pending) == 1 and not self._backlog and not self._flushing:
            # What nearly always holds, and the same as settling it.
            self._pending.popleft()
            if self._transport is not None:
                self._transport.write(answer)
            return
        self._settle(exchange, answer)

    @property
    def _is_done(self) -> bool:
        """Whether no request is being received or answered."""
        return not (self._pending or self._backlog or (self._url and not self._ending))

    def _is_last(self, exchange: Exchange) -> bool:
        return self._pending[-1] is exchange and not self._backlog and not self._url

    def _settle(self, exchange: Exchange, answer: bytes) -> None:
        if len(self._pending) == 1 and not self._backlog and not self._flushing:
            self._pending.popleft()
            self._write(answer, exchange)
            return
        exchange.answer = answer
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Write all answers whose turn has come, as one, and go on with the backlog."""
        answers: list[bytes] = []
        last = None
        while self._pending and self._pending[0].answer is not None:
            last = self._pending.popleft()
            answers.append(last.answer)  # type: ignore[arg-type]
        if last is not None:
            self._write(b"".join(answers), last)
        self._flushing = False
        self._take_backlog()

    def _write(self, data: bytes, last: Exchange) -> None:
        transport = self._transport
        if transport is None:
            return
        transport.write(data)
        if not last.keep_alive or (self._is_done and (self._ending or self._shared.connections.draining)):
            if self._discarding:
                transport.write_eof()
            elif self._shared.connections.draining:
                # As with what is refused: the client may have asked for more before it saw that this was the last answer.
                transport.write_eof()
                asyncio.get_running_loop().call_later(LAST_REQUEST_S, transport.close)
            else:
                transport.close()

    def _take_backlog(self) -> None:
        shared = self._shared
        while self._backlog and not self._write_paused and len(self._pending) < shared.max_pipelined:
            exchange = self._backlog.popleft()
            self._pending.append(exchange)
            if exchange.answer is None:
                exchange.run(shared.routes[exchange.url], shared.dataplane)
            else:
                self._settle(exchange, exchange.answer)
        self._steer_reading()

    def _steer_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._backlog or self._write_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # Limits

    def _refuse(self, status: int, message: str) -> None:
        """Answer, after what is pending, that nothing more is read, and close.

        What the client still sends is thrown away for a while: closing with unread data would reset the connection and
        might take the answer with it.
        """
        self._discarding = self._ending = True
        body = encode_error(message)
        self._answer_later(Exchange(self.answered, keep_alive=False), compose(status, JSON, CLOSE, body))

    def _answer_later(self, exchange: Exchange, answer: bytes) -> None:
        """Put an answer known already in line behind those of all earlier requests."""
        if self._backlog:
            exchange.answer = answer
            self._backlog.append(exchange)
        else:
            self._pending.append(exchange)
            self._settle(exchange, answer)

    def _check_body(self, size: int) -> None:
        limit = self._shared.max_request_bytes
        if size > limit:
            self._refuse(413, f"the body is larger than {limit} bytes")
            raise _Refused

    def _check_overhead(self, size: int) -> None:
        """Bound what is received without bringing a request or its body forward: heads, trailers, chunk extensions."""
        self._overhead_bytes += size
        if self._overhead_bytes > self._shared.max_header_bytes:
            self._refuse_head()

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head of the request is larger than {self._shared.max_header_bytes} bytes")

    def _count(self, value: bytes) -> int:
        if value.isdigit() and len(value) < 19:
            return int(value)
        self._refuse(400, "header Inference-Header-Content-Length is not a number of bytes")
        raise _Refused

    def check_time(self, now: float) -> None:
        """Cut the client off if nothing has come forward for longer than it may; ``now`` in seconds."""
        transport = self._transport
        if transport is None:
            return
        config = self._shared.config
        unwritten = transport.get_write_buffer_size()
        reading = bool(self._url or self._overhead_bytes)
        seen = (self._messages, reading, self._discarding, unwritten)
        if seen != self._seen or (self._pending and not unwritten and not reading):
            self._seen, self._since = seen, now
            return
        waited = now - self._since
        if self._discarding:
            if waited >= _LINGER_S:
                transport.abort()
        elif unwritten:
            if waited >= config.idle_timeout_s:
                transport.abort()
        elif reading:
            if waited >= config.request_timeout_s:
                self._refuse(408, f"the request took longer than {config.request_timeout_s:g} s to arrive")
        elif waited >= config.idle_timeout_s:
            transport.close()

    def begin_drain(self) -> None:
        """Answers say it by themselves."""

    def close_if_idle(self) -> None:
        """Close unless a request is being received or answered."""
        if self._transport is not None and not (self._pending or self._backlog or self._url):
            self._transport.close()

    def abort(self) -> None:
        """Close at once, whatever is in flight."""
        if self._transport is not None:
            self._transport.abort()
