"""One HTTP/1.1 connection, as an asyncio protocol: this path decides how many requests a core serves.

It parses with httptools and looks only at the headers that it needs. A request that begins with a head seen before, and
is here in whole, does not go through the parser at all.
"""

from __future__ import annotations

import asyncio

import httptools

from penstock.errors import InvalidArgument, Unavailable
from penstock.online.server.http.answer import CLOSE, CONTINUE, JSON, compose
from penstock.online.server.http.body import BodyReceiver
from penstock.online.server.http.codec.encoder import encode_error
from penstock.online.server.http.context import HttpContext
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.http.head import MAX_KNOWN_BYTES, RequestHead
from penstock.online.server.http.responder import Responder
from penstock.tensor import Buffer

_HEADER_OVERHEAD = 32
_LINGER_S = 2.0
_CONTENT_LENGTH = b"content-length"
_EXPECT = b"expect"
_MAX_DIGITS = 20
_END = b"\r\n\r\n"
_RETRY = b"Retry-After: 1\r\n"
_DIRECT_BYTES = 64 << 10
"""If more than this is missing of a body, it does not go through the parser."""


class _Refused(Exception):
    """Raised out of the parser's callbacks to end parsing; the answer is already queued."""


class Http1Connection(Responder):
    """One client. ``on_*`` are called by the parser."""

    protocol = "HTTP/1.1"

    __slots__ = (
        "_body",
        "_body_bytes",
        "_chunked",
        "_expects",
        "_head",
        "_header_bytes",
        "_is_aside",
        "_length",
        "_messages",
        "_overhead_bytes",
        "_parser",
        "_progressed",
        "_reserved_bytes",
        "_seen",
        "_since",
        "_text",
        "_url",
    )

    def __init__(self, context: HttpContext) -> None:
        super().__init__(context)
        self._parser = httptools.HttpRequestParser(self)
        self._progressed = False  # the bytes just received brought a request forward
        self._messages = 0
        self._seen: tuple[int, bool, bool, int] | None = None
        self._since = 0.0
        self._text = b""  # where the bytes just received begin a request, its head
        self._url = b""
        self._body: Buffer = b""
        self._reserved_bytes = 0
        self._head = RequestHead()
        self._header_bytes = 0
        self._is_aside = False  # a receiver has the transport
        self._begin_message()

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self.context.connections.add(self):
            self._refuse(503, "too many connections", _RETRY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_body()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        if not self._receiving:
            data = self._take_known(data)
            if not data:
                return
        self._progressed = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._ending:
                self._refuse(400, f"malformed HTTP: {error}")
        self._text = b""
        if not self._progressed and not self._ending:
            self._check_overhead(len(data))
        if self._length - self._body_bytes > _DIRECT_BYTES and self._body_bytes and not self._ending:
            self._receive_directly()

    def _receive_directly(self) -> None:
        """Leave the transport to a receiver until the rest of the body is there."""
        receiver = BodyReceiver(self, self._length, self._head.json_length or 0)
        if self._transport is not None and receiver.begin(self._body):
            self._body = b""
            self._is_aside = True
            self._transport.set_protocol(receiver)

    def _return(self) -> None:
        if self._is_aside:
            self._is_aside = False
            if self._transport is not None:
                self._transport.set_protocol(self)

    # The receiver's side

    def reserve_body(self, size: int) -> bool:
        """See ``BodyOwner``."""
        try:
            self._hold(size)
        except _Refused:
            return False
        return True

    def body_received(self, body: memoryview) -> None:
        """See ``BodyOwner``."""
        self._return()
        self._body, self._body_bytes = body, len(body)
        try:
            self.on_message_complete()
        except _Refused:
            return
        # The other one still waits for the body.
        self._parser = httptools.HttpRequestParser(self)

    def _take_known(self, data: bytes) -> bytes:
        """Take the requests in ``data``, which begins with one, as long as their heads are known; what is left."""
        heads = self.context.heads
        start, size = 0, len(data)
        while True:
            end = data.find(_END, start, start + MAX_KNOWN_BYTES)
            if end < 0:
                text = b""
                break
            end += len(_END)
            text = data[start:end]
            head = heads.get(text)
            if head is None:
                break
            stop = end + head.body_bytes
            if stop > size or head.body_bytes > self.context.free_bytes:
                text = b""  # known already
                break
            self._messages += 1
            self._take(Exchange(self, head, data[end:stop]))
            if stop == size or self._ending:
                return b""
            start = stop
        self._text = text
        return data[start:] if start else data

    # The parser's side

    def on_message_begin(self) -> None:
        self._receiving = True

    def on_url(self, url: bytes) -> None:
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name)
        self._header_bytes += size + len(value) + _HEADER_OVERHEAD
        if self._chunked:
            return  # a trailer, which may not stand for a header
        if size == len(_CONTENT_LENGTH) and name.lower() == _CONTENT_LENGTH:
            # The parser has checked that it is a number.
            self._length = int(value[:_MAX_DIGITS])
            self._check_body(self._length)
        elif size == len(_EXPECT) and name.lower() == _EXPECT and value.lower() == b"100-continue":
            self._expects = True
            # A separate exchange, so that it keeps its place behind the answers of earlier requests.
            self._answer_later(Exchange(self, RequestHead()), CONTINUE)
        else:
            try:
                self._head.read(name, value)
                if self.context.keys and name.lower() in self.context.keys:
                    self._head.keys[name.lower().decode("latin-1")] = value
            except InvalidArgument as error:
                self._refuse(400, str(error))
                raise _Refused from None

    def on_chunk_header(self) -> None:
        self._chunked = True

    def on_body(self, data: bytes) -> None:
        self._progressed = True
        if not self._body:
            self._body = data
            self._body_bytes = len(data)
        else:
            # Grown in place, so that a body in many small pieces takes no more memory than its size.
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += data
            self._body_bytes += len(data)
        if self._body_bytes > self.context.free_bytes:
            self._check_body(self._body_bytes)
            self._hold(self._body_bytes)

    def on_message_complete(self) -> None:
        if self._ending:
            return
        self._progressed = True
        self._messages += 1
        context = self.context
        if self._header_bytes + len(self._url) > context.max_header_bytes:
            self._refuse_head()
            raise _Refused
        parser = self._parser
        if parser.should_upgrade():
            # The parser keeps the body of such a request to itself, so it cannot be answered as if nothing had been asked.
            self._refuse(501, "changing the protocol is not supported: ask without the header Upgrade")
            raise _Refused
        head = self._finish_head()
        if self._text:
            if not self._chunked and not self._expects and head.keep_alive and not head.http_1_0:
                context.heads.learn(self._text, head)
            self._text = b""
        self._ending = not head.keep_alive
        exchange = Exchange(self, head, self._body, head.keep_alive, self._reserved_bytes)
        self._reserved_bytes = 0
        self._begin_message()
        self._take(exchange)

    def _finish_head(self) -> RequestHead:
        head, parser = self._head, self._parser
        head.method = method = parser.get_method()
        head.route = route = self.context.routes[self._url]
        head.handler = route.handlers.get(method)
        head.keep_alive = parser.should_keep_alive()
        head.http_1_0 = parser.get_http_version() == "1.0"
        head.body_bytes = self._body_bytes
        return head

    def _begin_message(self) -> None:
        self._receiving = False
        self._url = b""
        self._body = b""
        self._body_bytes = 0
        self._length = 0
        self._header_bytes = 0
        self._overhead_bytes = 0
        self._head = RequestHead()
        self._chunked = False
        self._expects = False

    # Limits

    def _refuse(self, status: int, message: str, headers: bytes = b"") -> None:
        """Answer, after what is pending, that nothing more is read, and close.

        What the client still sends is thrown away for a while: closing with unread data would reset the connection and
        might take the answer with it.
        """
        self._discarding = self._ending = True
        self._return()
        self._drop_body()
        body = encode_error(message)
        exchange = Exchange(self, RequestHead(), keep_alive=False)
        self._answer_later(exchange, compose(status, JSON + headers, CLOSE, body))

    def _drop_body(self) -> None:
        self._body = b""
        self.context.give_back(self._reserved_bytes)
        self._reserved_bytes = 0

    def _check_body(self, size: int) -> None:
        limit = self.context.max_request_bytes
        if size > limit:
            self._refuse(413, f"the body is larger than {limit} bytes")
            raise _Refused

    def _hold(self, size: int) -> None:
        """Reserve ``size`` bytes of the server's budget for the body; announced bytes that may never come are not counted."""
        try:
            self._reserved_bytes += self.context.reserve(size, self._reserved_bytes)
        except Unavailable as error:
            self._refuse(503, str(error), _RETRY)
            raise _Refused from None

    def _check_overhead(self, size: int) -> None:
        """Bound what is received without bringing a request or its body forward: heads, trailers, chunk extensions."""
        self._overhead_bytes += size
        if self._overhead_bytes > self.context.max_header_bytes:
            self._refuse_head()

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head of the request is larger than {self.context.max_header_bytes} bytes")

    def check_time(self, now: float) -> None:
        """Disconnect a client that has made no progress within its time limit; ``now`` in seconds."""
        transport = self._transport
        if transport is None:
            return
        self._probe()
        config = self.context.config
        unwritten = transport.get_write_buffer_size()
        reading = bool(self._receiving or self._overhead_bytes)
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
