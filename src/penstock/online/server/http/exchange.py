"""One HTTP request, from its parsed head to its response, and the methods that handlers answer with."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import orjson

from penstock.errors import Cancelled, Code, InvalidArgument, PenstockError, bounded
from penstock.online.scheduler.base import Cancellable
from penstock.online.server import status
from penstock.online.server.answer_form import TEXT, AnswerForm
from penstock.online.server.http import compression
from penstock.online.server.http.answer import JSON, Answer
from penstock.online.server.http.codec.encoder import encode_error
from penstock.online.server.http.context import HttpContext
from penstock.online.server.http.head import RequestHead
from penstock.online.server.http.routes import Route
from penstock.request import InferRequest
from penstock.tensor import Buffer

_log = logging.getLogger(__name__)
_Body = TypeVar("_Body")

_MIN_COMPRESSED = 1024
_INLINE_BYTES = 1024
"""Larger bodies are compressed and decompressed on another thread."""
_RETRY_AFTER_S = 1.0
_PREFLIGHT = b"Access-Control-Allow-Methods: %b\r\nAccess-Control-Allow-Headers: *, Authorization\r\nAccess-Control-Max-Age: 600\r\n"
_BUSY = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)


class AnswerSink(Protocol):
    """The part of a connection that an exchange uses: it sends the response, whole or as a stream."""

    context: HttpContext

    def answered(
        self, exchange: Exchange, status: int, headers: bytes, body: bytes, tensors: Sequence[Buffer] = ()
    ) -> None:
        """Send the whole response; each line of ``headers`` ends with CRLF."""

    def begin_stream(self, exchange: Exchange, headers: bytes) -> None:
        """Begin a response of status 200 that is sent in pieces; each line of ``headers`` ends with CRLF."""

    def send(self, exchange: Exchange, data: bytes) -> None:
        """Send ``data``, which must not be empty. A client that leaves too much unread is disconnected and its request cancelled."""

    def end_stream(self, exchange: Exchange) -> None:
        """End the stream."""


class Exchange(msgspec.Struct, eq=False):
    """A received request. It gets one response, whole or as a stream."""

    sink: AnswerSink
    head: RequestHead
    body: Buffer = b""
    keep_alive: bool = True
    reserved_bytes: int = 0
    """Bytes taken from the server's budget for bodies; the connection returns them with the response."""
    client: str = ""
    """The client's name in the keys file."""
    form: AnswerForm = TEXT
    pending: Cancellable | None = None
    """Cancels the inference."""
    answer: Answer | None = None
    """The response, while it waits for those of earlier requests."""
    is_streaming: bool = False
    """True if more of the response may follow."""
    is_gone: bool = False
    """True if the client has disconnected."""

    def run(self) -> None:
        """Check access and call the handler, which answers now or later."""
        try:
            head = self.head
            handler = head.handler
            if handler is None:
                methods = b", ".join(sorted(head.route.handlers))
                if head.sender.is_preflight and head.cors:
                    self.reply(200, _PREFLIGHT % (methods or b"GET, POST"))
                elif methods:
                    self.fail_with(405, "Method Not Allowed", b"Allow: %b\r\n" % methods)
                else:
                    self.fail_with(404, "Not Found")
                return
            guard = head.route.guard
            if guard is not None:
                self.client = guard(head.credential, head.keys, head.route.model)
            if head.encoding:
                self._decompress(head.encoding)
            else:
                handler(self, head.route)
        except Exception as error:  # noqa: BLE001 - a bug must not affect the other requests
            self.fail_unexpected(error)

    def cancel(self) -> None:
        """Cancel the request, since the client has disconnected; a batch that is already running continues."""
        self.is_gone = True
        if self.pending is not None:
            self.pending.cancel()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, which answers; an exception that it raises becomes the response."""

        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - as in ``run``
                self.fail_unexpected(error)

        self.sink.context.start(run())

    def read(self, kind: type[_Body]) -> _Body:
        """Decode the JSON body as ``kind``; an empty body reads as an empty object. Raises InvalidArgument."""
        try:
            return msgspec.json.decode(self.body or b"{}", type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"invalid request body: {error}") from None
        except RecursionError:
            raise InvalidArgument("the body's JSON is nested too deeply") from None

    def reply(self, status: int, headers: bytes, body: bytes = b"", tensors: Sequence[Buffer] = ()) -> None:
        """Answer, compressed if the client prefers that and the response is large enough."""
        if self.form.lease is not None:
            self.form.release()
        encoding = self.head.accepted
        if not encoding:
            self.sink.answered(self, status, headers, body, tensors)
            return
        parts = (body, *tensors)
        size = sum(map(len, parts))
        if size < _MIN_COMPRESSED:
            self.sink.answered(self, status, headers, body, tensors)
            return
        headers += b"Content-Encoding: %b\r\nVary: Accept-Encoding\r\n" % encoding

        async def compress() -> None:
            compressed = await asyncio.to_thread(compression.compress, parts, encoding)
            self.sink.answered(self, status, headers, compressed)

        self.later(compress())

    def reply_json(self, content: Any) -> None:
        """Answer with ``content`` as JSON."""
        self.reply(200, JSON, orjson.dumps(content))

    def reply_empty(self, status: int = 200) -> None:
        self.reply(status, JSON)

    def fail(self, error: PenstockError) -> None:
        """Answer with ``error``, its status and the headers that go with it."""
        headers = b""
        if error.code in _BUSY:
            seconds = _RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
            headers = b"Retry-After: %d\r\n" % max(1, math.ceil(seconds))
        elif error.code is Code.UNAUTHENTICATED:
            headers = b"WWW-Authenticate: Bearer\r\n"
        code = 413 if isinstance(error, compression.TooLarge) else status.HTTP[error.code]
        self.fail_with(code, str(error), headers)

    def fail_with(self, status: int, message: str, headers: bytes = b"") -> None:
        """Answer with an error. The response to HEAD has no body."""
        error = self.head.route.error
        body = encode_error(message) if error is None else error(status, bounded(message))
        self.reply(status, JSON + headers, b"" if self.head.method == b"HEAD" else body)

    def fail_unexpected(self, error: Exception) -> None:
        """Answer with ``error``; other errors than PenstockError are logged and reported as an internal error."""
        self.fail(as_error(error))

    def introduce(self, request: InferRequest) -> None:
        """Set the client and the trace context of ``request``."""
        request.client = self.client
        head = self.head
        if head.traceparent:
            request.traceparent, request.tracestate = head.traceparent, head.tracestate

    def _decompress(self, encoding: bytes) -> None:
        if not compression.knows(encoding):
            accept = b"Accept-Encoding: %b\r\n" % compression.ENCODINGS
            self.fail_with(501, "unknown Content-Encoding of the body: use gzip, deflate or none", accept)
            return
        limit = self.sink.context.max_request_bytes
        if len(self.body) <= _INLINE_BYTES:
            self._run_decompressed(compression.decompress(self.body, encoding, limit))
        else:
            self.later(self._decompress_on_thread(encoding, limit))

    async def _decompress_on_thread(self, encoding: bytes, limit: int) -> None:
        """Decompress in steps, which reserve memory as it fills and stop if the client disconnects."""
        whole = bytearray()
        steps = compression.inflate(self.body, encoding, limit, whole)
        size = 1
        while size:
            size = await asyncio.to_thread(next, steps, 0)
            if self.is_gone:
                raise Cancelled("the client has disconnected")
            self._reserve(size)
        self._run_decompressed(whole)

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += self.sink.context.reserve(size, self.reserved_bytes)

    def _run_decompressed(self, body: Buffer) -> None:
        self._reserve(len(body))
        self.body = body
        handler = self.head.handler
        assert handler is not None
        handler(self, self.head.route)


def as_error(error: Exception) -> PenstockError:
    """The error to show to the client: ``error`` itself, or, after logging it, an internal error."""
    if isinstance(error, PenstockError):
        return error
    _log.error("request failed", exc_info=error)
    return PenstockError("internal error")


def later(content: Callable[[Any, Exchange, Route], Awaitable[Any]]) -> Callable[[Any, Exchange, Route], None]:
    """Decorate a coroutine method as a handler that answers with the result as JSON; None is an empty response."""

    async def answer(self: Any, exchange: Exchange, route: Route) -> None:
        result = await content(self, exchange, route)
        if result is None:
            exchange.reply_empty()
        else:
            exchange.reply_json(result)

    @functools.wraps(content)
    def handle(self: Any, exchange: Exchange, route: Route) -> None:
        exchange.later(answer(self, exchange, route))

    return handle
