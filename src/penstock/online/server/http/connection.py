"""One HTTP/1.1 connection, as an asyncio protocol. This is the hot path of the server.

httptools parses requests. A complete request whose head is already known bypasses the parser.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httptools

from penstock.errors import InvalidArgument, PenstockError, Unavailable
from penstock.online.server import status
from penstock.online.server.http.answer import CLOSE, CONTINUE, JSON, compose, without_body
from penstock.online.server.http.body import BodyReceiver
from penstock.online.server.http.codec.encoder import encode_error
from penstock.online.server.http.context import FREE_BYTES, HttpContext, is_decoded
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.http.head import MAX_KNOWN_BYTES, RequestHead
from penstock.online.server.http.responder import Responder
from penstock.online.server.network.turns import FREE_UNITS
from penstock.tensor import Buffer

_HEADER_OVERHEAD = 32
_CHUNK_OVERHEAD = 16
"""Maximum bytes of framing in a chunked body, per byte of its content."""
_LINGER_S = 2.0
_CONTENT_LENGTH = b"content-length"
_TRANSFER_ENCODING = b"transfer-encoding"
_EXPECT = b"expect"
_MAX_DIGITS = 20
_END = b"\r\n\r\n"
_RETRY = b"Retry-After: 1\r\n"
_PART_BYTES = 4 << 10
_GATED_BYTES = 1 << 20
"""Size above which a body that needs decoding is received only once the gate admits it."""
_DIRECT_BYTES = 64 << 10
"""If more than this number of bytes of a body are missing, they bypass the parser."""


class _Refused(Exception):
    """Raised in the parser's callbacks to stop parsing. The response is then already queued."""


class Http1Connection(Responder):
    """One client's connection. The parser calls the methods ``on_*``."""

    protocol = "HTTP/1.1"

    __slots__ = (
        "_body",
        "_body_bytes",
        "_chunked",
        "_exchange",
        "_expects",
        "_framing",
        "_head",
        "_header_bytes",
        "_is_aside",
        "_is_upgrade",
        "_is_wanted",
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
        "lane",
    )

    def __init__(self, context: HttpContext) -> None:
        super().__init__(context)
        self.lane = asyncio.Lock()
        self._parser = httptools.HttpRequestParser(self)
        self._progressed = False  # the last received bytes belonged to a body or completed a request
        self._messages = 0
        self._seen: tuple[int, bool, bool, int] | None = None
        self._since = 0.0
        self._text = b""  # the request head at the start of the last bytes received
        self._url = b""
        self._body: Buffer = b""
        self._reserved_bytes = 0
        self._length = 0
        self._head = RequestHead()
        self._framing = b""  # the headers that say where the body ends
        self._is_upgrade = False  # the parser stopped after a head with ``Upgrade``, which the server ignores
        self._header_bytes = 0
        self._exchange = Exchange(self, self._head)
        self._is_wanted = True  # the request will run once its body is complete
        self._is_aside = False  # a BodyReceiver is the transport's protocol
        self._begin_message()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self.context.connections.add(self):
            if self.context.spare is None:
                self._refuse(503, "too many connections", _RETRY)
            else:
                self._leave_for(Http1Connection(self.context.spare))

    @property
    def requests(self) -> int:
        return self._messages

    def _leave_for(self, other: Http1Connection) -> None:
        transport = self._transport
        assert transport is not None
        self.connection_lost(None)
        transport.set_protocol(other)
        other.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_body()
        super().connection_lost(exc)
        # Both refer to the connection, and would keep it in memory until the garbage collector runs.
        del self._parser, self._exchange

    def data_received(self, data: bytes) -> None:
        if self._ending:
            self._charge(len(data))
            return
        if self._unparsed:
            self._unparsed += data
            return
        if not self._receiving:
            # Fast path, equivalent to ``_parse``: the data is exactly one request with a known head.
            end = data.find(_END, 0, MAX_KNOWN_BYTES) + 4
            head = self.context.heads.get(data[:end])
            if head is not None and end + head.body_bytes == len(data):
                self._messages += 1
                self._take(Exchange(self, head, data[end:]))
                return
        turns = self.context.connections.turns
        begun = self._begin_turn(max(FREE_UNITS, turns.left))
        self._parse(data)
        used = self._end_turn(begun)
        if used > FREE_UNITS:
            turns.spend(used)
        self._continue()

    def _parse(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self._ending:
            # Parse a partly received request to its end, unless it is chunked, because there may be any number of chunks.
            if at and (self._chunked or not self._receiving) and (self._is_late or self._is_full):
                self._unparsed = data[at:]
                break
            if not self._receiving and (stop := self._take_known(data, at)):
                at = stop
                continue
            stop = self._part(data, at)
            self._feed(data[at:stop])
            at = stop
        self._text = b""
        if self._length - self._body_bytes > _DIRECT_BYTES and self._body_bytes and not self._ending:
            self._receive_directly()

    def _part(self, data: bytes, at: int) -> int:
        """The end of the part of ``data`` to parse next: a head, a body, or ``_PART_BYTES`` if the length is unknown."""
        if self._chunked:
            return at + _PART_BYTES
        if self._receiving and self._length > self._body_bytes:
            return at + self._length - self._body_bytes
        end = data.find(_END, at, at + _PART_BYTES)
        return at + _PART_BYTES if end < 0 else end + len(_END)

    def _feed(self, data: bytes) -> None:
        self._progressed = False
        before = (self._messages, self._chunked, self._body_bytes)
        self._feed_parser(data)
        if not self._progressed and not self._ending:
            self._check_overhead(len(data))
        elif before[1] and before[0] == self._messages and not self._ending:
            # Chunks of one byte are allowed, but long chunk extensions are not.
            self._check_overhead(len(data) - _CHUNK_OVERHEAD * (self._body_bytes - before[2]))

    def _feed_parser(self, data: Buffer) -> None:
        try:
            while True:
                try:
                    self._parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    data = memoryview(data)[upgrade.args[0] :]
                    self._ignore_upgrade()
        except httptools.HttpParserError as error:
            if not self._ending:
                self._refuse(400, f"malformed HTTP: {error}")

    def _ignore_upgrade(self) -> None:
        """Continue a request with the header ``Upgrade``, which Java's client sends to offer HTTP/2.

        The parser stops after such a head without checking its framing. A new parser therefore gets a head with the same framing.
        """
        closes = b"" if self._parser.should_keep_alive() else b"Connection: close\r\n"
        version = self._parser.get_http_version().encode()
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/%b\r\n%b%b\r\n" % (version, closes, self._framing))
        self._is_upgrade = False

    def _receive_directly(self) -> None:
        """Let a BodyReceiver read from the transport until the body is complete."""
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

    # Called by the BodyReceiver

    def charge_body(self, received: int) -> None:
        self._charge(received)

    def reserve_body(self, size: int) -> bool:
        try:
            self._hold(size)
        except _Refused:
            return False
        return True

    def body_received(self, body: memoryview) -> None:
        self._return()
        self._body, self._body_bytes = body, len(body)
        try:
            self.on_message_complete()
        except _Refused:
            return
        # The old parser would still expect the body.
        self._parser = httptools.HttpRequestParser(self)

    def _take_known(self, data: bytes, start: int) -> int:
        """Run the request at ``start`` in ``data`` if it is complete and its head is known. Returns its end, or 0."""
        end = data.find(_END, start, start + MAX_KNOWN_BYTES)
        self._text = b""
        if end < 0:
            return 0
        end += len(_END)
        text = data[start:end]
        head = self.context.heads.get(text)
        if head is None:
            self._text = text
            return 0
        stop = end + head.body_bytes
        if stop > len(data):
            return 0  # the head need not be learned again
        self._messages += 1
        self._take(Exchange(self, head, data[end:stop]))
        return stop

    # Called by the parser

    def on_message_begin(self) -> None:
        self._receiving = True

    def on_url(self, url: bytes) -> None:
        if self._is_upgrade:
            return
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name)
        self._header_bytes += size + len(value) + _HEADER_OVERHEAD
        if self._chunked or self._is_upgrade:
            return  # trailers are ignored, because they must not override headers
        if size == len(_CONTENT_LENGTH) and name.lower() == _CONTENT_LENGTH:
            # The parser has validated the number, and rejects a repeated header.
            self._length = int(value[:_MAX_DIGITS])
            self._framing += b"Content-Length: %b\r\n" % value
        elif size == len(_EXPECT) and name.lower() == _EXPECT and value.lower() == b"100-continue":
            self._expects = True
        else:
            if size == len(_TRANSFER_ENCODING) and name.lower() == _TRANSFER_ENCODING:
                self._framing += b"Transfer-Encoding: %b\r\n" % value
            try:
                self._head.read(name, value)
                if self.context.keys and (key := name.lower()) in self.context.keys:
                    self._head.read_key(key, value)
            except InvalidArgument as error:
                self._head.method = self._parser.get_method()
                self._refuse(400, str(error))
                raise _Refused from None

    def on_headers_complete(self) -> None:
        """Check everything that needs only the head, including the client's rights and the announced size of the body."""
        if self._is_upgrade:
            return
        context, parser, head = self.context, self._parser, self._head
        self._check_head()
        head.method = parser.get_method()
        try:
            head.check(context.web, head.method, parser.get_http_version(), self._url)
        except PenstockError as error:
            self._refuse(getattr(error, "http_status", status.HTTP[error.code]), str(error))
            raise _Refused from None
        head.route = context.routes[self._url]
        head.handler = head.route.handlers.get(head.method)
        head.http_1_0 = parser.get_http_version() == "1.0"
        head.is_usual = not (head.cors or head.http_1_0 or head.method == b"HEAD")
        self._exchange = Exchange(self, head)
        self._is_wanted = self._exchange.admit()
        if self._is_wanted:
            self._check_body(self._length)
            if self._length > _GATED_BYTES:
                self._wait_for_gate(self._length)
            if self._expects:
                # The interim response gets its own exchange, so that it follows the responses to earlier requests.
                self._answer_later(Exchange(self, RequestHead()), CONTINUE)
        elif self._expects or self._length > FREE_BYTES:
            self._turn_away()

    def on_chunk_header(self) -> None:
        self._chunked = True

    def on_body(self, data: bytes) -> None:
        self._progressed = True
        if not self._is_wanted:
            self._body_bytes += len(data)
            if self._body_bytes > FREE_BYTES:
                self._turn_away()
            return
        if not self._body:
            self._body = data
            self._body_bytes = len(data)
        else:
            # A bytearray grows in place, so a body in many small pieces takes no extra memory.
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += data
            self._body_bytes += len(data)
        if self._body_bytes > FREE_BYTES:
            self._check_body(self._body_bytes)
            self._hold(self._body_bytes)
            if self._chunked and self._body_bytes > _GATED_BYTES and not self._gate.is_used:
                self._wait_for_gate(self.context.limit_of(self._head))

    def on_message_complete(self) -> None:
        if self._ending:
            return
        parser, head = self._parser, self._head
        if parser.should_upgrade() and head.method != b"CONNECT":
            self._is_upgrade = True  # the parser reports the message as complete after its head
            return
        self._progressed = True
        self._messages += 1
        self._check_head()  # checked again, because trailers count as headers
        if parser.should_upgrade():
            self._refuse(501, "this server is not a proxy: the method CONNECT is not supported")
            raise _Refused
        head.keep_alive = parser.should_keep_alive()
        head.body_bytes = self._body_bytes
        if self._text:
            if (
                not (self._chunked or self._expects or head.http_1_0)
                and head.keep_alive
                and self._body_bytes <= FREE_BYTES
            ):
                self.context.heads.learn(self._text, head)
            self._text = b""
        self._ending = not head.keep_alive
        exchange = self._exchange
        exchange.body, exchange.keep_alive, exchange.reserved_bytes = self._body, head.keep_alive, self._reserved_bytes
        self._reserved_bytes = 0
        if self._gate.is_used:
            exchange.passage = self._gate.take()
            self._steer_reading()
        self._begin_message()
        self._take(exchange)

    def _begin_message(self) -> None:
        self._receiving = False
        self._url = b""
        self._body = b""
        self._body_bytes = 0
        self._length = 0
        self._header_bytes = 0
        self._overhead_bytes = 0
        self._head = RequestHead()
        self._framing = b""
        self._is_upgrade = False
        self._chunked = False
        self._expects = False
        self._is_wanted = True

    # Limits

    def _turn_away(self) -> None:
        """Answer a refused request without waiting for its body, then close."""
        self._discarding = self._ending = True
        self._exchange.keep_alive = False
        self._take(self._exchange)
        raise _Refused

    def _refuse(self, status: int, message: str, headers: bytes = b"") -> None:
        """Queue an error response, then close.

        Further data from the client is read and discarded for a while. Closing a connection with unread data would reset it, and the
        response might be lost.
        """
        self._discarding = self._ending = True
        self._return()
        self._drop_body()
        answer = compose(status, JSON + headers + self._head.cors, CLOSE, encode_error(message))
        if self._head.method == b"HEAD":
            answer = without_body(answer)
        self._answer_later(Exchange(self, RequestHead(), keep_alive=False), answer)

    def _wait_for_gate(self, size: int) -> None:
        """If the body needs decoding, pause reading until the gate admits the body of ``size`` bytes."""
        if is_decoded(self._head):
            self._gate.wait(self.context, size, self._steer_reading)
            self._steer_reading()

    def _drop_body(self) -> None:
        if self._gate.is_used:
            self._gate.leave()
            self._steer_reading()
        self._body = b""
        self.context.give_back(self._reserved_bytes)
        self._reserved_bytes = 0

    def _check_body(self, size: int) -> None:
        limit, most_json = self.context.limit_of(self._head), self.context.config.max_json_bytes
        if size > limit:
            what = f"{limit} bytes of JSON (send tensors as binary data)" if limit == most_json else f"{limit} bytes"
            self._refuse(413, f"the body is larger than {what}")
            raise _Refused
        if (self._head.json_length or 0) > most_json:
            self._refuse(413, f"the body has more than {most_json} bytes of JSON (send tensors as binary data)")
            raise _Refused

    def _hold(self, size: int) -> None:
        """Reserve ``size`` bytes of the server's budget for the part of the body that is in memory."""
        try:
            self._reserved_bytes += self.context.reserve(size, self._reserved_bytes)
        except Unavailable as error:
            self._refuse(503, str(error), _RETRY)
            raise _Refused from None

    def _check_overhead(self, size: int) -> None:
        """Limit the received bytes that do not belong to a body: heads, trailers, chunk extensions."""
        self._overhead_bytes += size
        if self._overhead_bytes > self.context.max_header_bytes:
            self._refuse_head()
        elif self._overhead_bytes > FREE_BYTES:
            with suppress(_Refused):
                self._hold(self._overhead_bytes)

    def _check_head(self) -> None:
        if self._header_bytes + len(self._url) > self.context.max_header_bytes:
            self._refuse_head()
            raise _Refused

    def _refuse_head(self) -> None:
        self._refuse(431, f"the request headers are larger than {self.context.max_header_bytes} bytes")

    def check_time(self, now: float) -> None:
        """Disconnect the client if it has made no progress within its time limit. ``now`` is in seconds."""
        transport = self._transport
        if transport is None:
            return
        self._look_for_client()
        self._count_unread()
        config = self.context.config
        unwritten = self._outgoing.unsent
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
