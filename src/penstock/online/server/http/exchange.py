"""One request of an HTTP connection, from parsed to its answer, and what its handler answers with."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import orjson

from penstock.errors import Cancelled, Code, InvalidArgument, PenstockError
from penstock.online.scheduler.base import Cancellable
from penstock.online.server import status
from penstock.online.server.answer_form import TEXT, AnswerForm
from penstock.online.server.http import compression
from penstock.online.server.http.answer import JSON, Answer
from penstock.online.server.http.codec.encoder import encode_error
from penstock.online.server.http.head import RequestHead
from penstock.online.server.http.routes import Handler, Route
from penstock.request import InferRequest
from penstock.tensor import Buffer

_log = logging.getLogger(__name__)
_Body = TypeVar("_Body")

_MIN_COMPRESSED = 1024
_INLINE_BYTES = 1024
"""Larger bodies are compressed and decompressed on another thread."""
_RETRY_AFTER_S = 1.0
_BUSY = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)


class AnswerSink(Protocol):
    """The connection, as an exchange sees it: takes its answer, whole or as a stream."""

    @property
    def max_body_bytes(self) -> int:
        """The largest body, decompressed."""

    def answered(
        self, exchange: Exchange, status: int, headers: bytes, body: bytes, tensors: Sequence[Buffer] = ()
    ) -> None:
        """The whole answer; ``headers`` are lines with their ends."""

    def begin_stream(self, exchange: Exchange, headers: bytes) -> None:
        """The answer is 200 and comes in pieces; ``headers`` are lines with their ends."""

    def send(self, exchange: Exchange, data: bytes) -> None:
        """One piece, not empty. A client that leaves too many of them unread is cut off, and its request cancelled."""

    def end_stream(self, exchange: Exchange) -> None:
        """There are no more pieces."""

    def reserve(self, exchange: Exchange, size: int) -> None:
        """Reserve memory for a body of ``size`` bytes until the answer. Raises Unavailable."""

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, which does not fail, beside everything else."""


class Exchange(msgspec.Struct, eq=False):
    """A request as received. It is answered once, in whole or as a stream."""

    sink: AnswerSink
    head: RequestHead
    body: Buffer = b""
    keep_alive: bool = True
    reserved_bytes: int = 0
    """Bytes of the server's budget for bodies; the connection gives them back with the answer."""
    client: str = ""
    """The name under which the caller is known."""
    form: AnswerForm = TEXT
    pending: Cancellable | None = None
    """The inference, which can be cancelled."""
    answer: Answer | None = None
    """The answer, while it waits for its turn."""
    is_streaming: bool = False
    """Whether more pieces of its answer may follow."""
    is_gone: bool = False
    """Whether the client has gone away."""

    def run(self) -> None:
        """Have it answered, now or later."""
        try:
            head = self.head
            handler = head.handler
            if handler is None:
                self._explain_route(head.route)
                return
            guard = head.route.guard
            if guard is not None:
                self.client = guard(head.credential, head.keys, head.route.model)
            if head.encoding:
                self._decompress(head.encoding)
            else:
                handler(self, head.route)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not take the other requests with it
            self.fail_unexpected(error)

    def cancel(self) -> None:
        """The client is gone: work that has not begun is dropped."""
        self.is_gone = True
        if self.pending is not None:
            self.pending.cancel()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """``work`` answers; if it raises, that is the answer."""

        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - as in ``run``
                self.fail_unexpected(error)

        self.sink.start(run())

    def read(self, kind: type[_Body]) -> _Body:
        """The JSON body as ``kind``; an empty body is an empty object. Raises InvalidArgument."""
        try:
            return msgspec.json.decode(self.body or b"{}", type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"the body is not what this resource takes: {error}") from None
        except RecursionError:
            raise InvalidArgument("the body's JSON is nested too deeply") from None

    def reply(self, status: int, headers: bytes, body: bytes = b"", tensors: Sequence[Buffer] = ()) -> None:
        """Answer; compressed, if the client prefers that and the answer is large enough."""
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
        self.later(self._compress(status, headers, parts, encoding))

    def reply_json(self, content: Any) -> None:
        """Answer with ``content``."""
        self.reply(200, JSON, orjson.dumps(content))

    def reply_empty(self, status: int = 200) -> None:
        self.reply(status, JSON)

    def fail(self, error: PenstockError) -> None:
        """Answer that the request failed."""
        headers = b""
        if error.code in _BUSY:
            seconds = _RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
            headers = b"Retry-After: %d\r\n" % max(1, math.ceil(seconds))
        elif error.code is Code.UNAUTHENTICATED:
            headers = b"WWW-Authenticate: Bearer\r\n"
        code = 413 if isinstance(error, compression.TooLarge) else status.HTTP[error.code]
        self.fail_with(code, str(error), headers)

    def fail_with(self, status: int, message: str, headers: bytes = b"") -> None:
        """Answer with ``message``; to HEAD without, since its answer has no body."""
        error = self.head.route.error
        body = encode_error(message) if error is None else error(status, message)
        self.reply(status, JSON + headers, b"" if self.head.method == b"HEAD" else body)

    def fail_unexpected(self, error: Exception) -> None:
        """Answer with ``error``; a bug of ours is logged, and the client sees an internal error."""
        self.fail(as_error(error))

    def introduce(self, request: InferRequest) -> None:
        """Set the client and the trace context of ``request``."""
        request.client = self.client
        head = self.head
        if head.traceparent:
            request.traceparent, request.tracestate = head.traceparent, head.tracestate

    def _explain_route(self, route: Route) -> None:
        if route.handlers:
            allow = b", ".join(sorted(route.handlers))
            self.fail_with(405, "Method Not Allowed", b"Allow: %b\r\n" % allow)
        else:
            self.fail_with(404, "Not Found")

    def _decompress(self, encoding: bytes) -> None:
        if not compression.knows(encoding):
            accept = b"Accept-Encoding: %b\r\n" % compression.ENCODINGS
            self.fail_with(501, "the Content-Encoding of the body is not known: use gzip, deflate or none", accept)
            return
        limit = self.sink.max_body_bytes
        if len(self.body) <= _INLINE_BYTES:
            self._run_decompressed(compression.decompress(self.body, encoding, limit))
        else:
            self.later(self._decompress_on_thread(encoding, limit))

    async def _decompress_on_thread(self, encoding: bytes, limit: int) -> None:
        """Step by step, so that memory is reserved as it fills, and nothing is done for a client that has gone."""
        whole = bytearray()
        steps = compression.inflate(self.body, encoding, limit, whole)
        while size := await _on_thread(lambda: next(steps, 0)):
            self.sink.reserve(self, size)
            self._check_wanted()
        self._check_wanted()
        self._run_decompressed(whole)

    def _check_wanted(self) -> None:
        if self.is_gone:
            raise Cancelled("the client is gone")

    def _run_decompressed(self, body: Buffer) -> None:
        self.sink.reserve(self, len(body))
        self.body = body
        handler = self.head.handler
        assert handler is not None
        handler(self, self.head.route)

    async def _compress(self, status: int, headers: bytes, parts: Sequence[Buffer], encoding: bytes) -> None:
        body = await _on_thread(lambda: compression.compress(parts, encoding))
        self.sink.answered(self, status, headers, body)


def as_error(error: Exception) -> PenstockError:
    """``error`` as the client may see it; a bug of ours is logged."""
    if isinstance(error, PenstockError):
        return error
    _log.error("request failed", exc_info=error)
    return PenstockError("internal error")


def later(content: Callable[[Exchange, Route], Awaitable[Any]]) -> Handler:
    """A handler that answers with what ``content`` returns, as JSON; None is an empty answer."""

    async def answer(exchange: Exchange, route: Route) -> None:
        result = await content(exchange, route)
        if result is None:
            exchange.reply_empty()
        else:
            exchange.reply_json(result)

    @functools.wraps(content)
    def handle(exchange: Exchange, route: Route) -> None:
        exchange.later(answer(exchange, route))

    return handle


async def _on_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work)
