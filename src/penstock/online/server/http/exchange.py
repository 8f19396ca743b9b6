"""One request of an HTTP connection, from parsed to its answer: handed to who answers it, and its inference encoded."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from penstock.errors import Cancelled, Code, PenstockError
from penstock.online.repository.handle import Handle
from penstock.online.scheduler.base import Cancellable
from penstock.online.server import status
from penstock.online.server.access.auth import Access
from penstock.online.server.answer_form import TEXT, AnswerForm
from penstock.online.server.classification import classify_outputs
from penstock.online.server.http import compression
from penstock.online.server.http.answer import JSON, Answer
from penstock.online.server.http.encoder import encode_error
from penstock.online.server.http.head import Head
from penstock.online.server.http.plan import Body
from penstock.online.server.http.routes import Handler, Needs, Route
from penstock.request import InferRequest, Outcome
from penstock.tensor import Buffer

if TYPE_CHECKING:
    from penstock.online.server.http.line import Line

_log = logging.getLogger(__name__)

_MIN_COMPRESSED = 1024
_INLINE_BYTES = 1024
"""More than this, compressed or not, is left to another thread."""
_RETRY_AFTER_S = 1.0
_BUSY = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)


class Exchange(msgspec.Struct, eq=False):
    """A request as received. It is answered once, in whole or as a stream."""

    line: Line
    head: Head
    body: Body = b""
    keep_alive: bool = True
    reserved_bytes: int = 0
    """Of the server's budget for bodies; the connection gives them back with the answer."""
    client: str = ""
    """The name under which the caller is known."""
    form: AnswerForm = TEXT
    pending: Cancellable | None = None
    """The inference, which can be cancelled."""
    answer: Answer | None = None
    """What is to be written when its turn comes."""
    is_streaming: bool = False
    """Whether more pieces of its answer may follow."""
    is_gone: bool = False
    """Whether nobody waits for its answer."""

    def run(self) -> None:
        """Have it answered, now or later."""
        try:
            head = self.head
            handler = head.handler
            if handler is None:
                self._explain_route(head.route)
                return
            if self.line.shared.access is not None:
                self._identify(head, self.line.shared.access)
            if head.encoding:
                self._decompress(head.encoding)
            else:
                handler(self, head.route)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not take the other requests with it
            self.fail(self.as_error(error))

    def cancel(self) -> None:
        """The client is gone: whatever has not begun need not."""
        self.is_gone = True
        if self.pending is not None:
            self.pending.cancel()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """``work`` answers; what it raises is the answer otherwise."""

        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - as in ``run``
                self.fail(self.as_error(error))

        self.line.shared.start(run())

    def reply(self, status: int, headers: bytes, body: bytes = b"", tensors: Sequence[Buffer] = ()) -> None:
        """Answer; compressed, if the client likes that and there is enough of it."""
        if self.form.lease is not None:
            self.form.release()
        encoding = self.head.accepted
        if not encoding:
            self.line.answered(self, status, headers, body, tensors)
            return
        parts = (body, *tensors)
        size = sum(map(len, parts))
        if size < _MIN_COMPRESSED:
            self.line.answered(self, status, headers, body, tensors)
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

    def as_error(self, error: Exception) -> PenstockError:
        """``error`` as the client may know it."""
        if isinstance(error, PenstockError):
            return error
        _log.error("request failed", exc_info=error)
        return PenstockError("internal error")

    def introduce(self, request: InferRequest) -> None:
        """Say in ``request`` who asks, and on whose behalf."""
        request.client = self.client
        head = self.head
        if head.traceparent:
            request.traceparent, request.tracestate = head.traceparent, head.tracestate

    def may_use(self, model: str) -> bool:
        """Whether the client has the right to ``model``."""
        access = self.line.shared.access
        return access is None or access.may(self.client, model)

    def _identify(self, head: Head, access: Access) -> None:
        route = head.route
        if route.needs is Needs.NOTHING:
            return
        self.client = access.identify(head.credential)
        if route.needs is Needs.ADMIN:
            access.require_admin(self.client)
        elif route.model:
            access.check(self.client, route.model)

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
        limit = self.line.shared.config.max_request_bytes
        if len(self.body) <= _INLINE_BYTES:
            self._run_decompressed(compression.decompress(self.body, encoding, limit))
        else:
            self.later(self._decompress_on_thread(encoding, limit))

    async def _decompress_on_thread(self, encoding: bytes, limit: int) -> None:
        """Step by step, so that memory is reserved as it fills, and nothing is done for a client that has gone."""
        whole = bytearray()
        steps = compression.inflate(self.body, encoding, limit, whole)
        while size := await _on_thread(lambda: next(steps, 0)):
            self._reserve(size)
            self._check_wanted()
        self._check_wanted()
        self._run_decompressed(whole)

    def _check_wanted(self) -> None:
        if self.is_gone:
            raise Cancelled("the client is gone")

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += self.line.shared.reserve(size, self.reserved_bytes)

    def _run_decompressed(self, body: Body) -> None:
        self._reserve(len(body))
        self.body = body
        handler = self.head.handler
        assert handler is not None
        handler(self, self.head.route)

    async def _compress(self, status: int, headers: bytes, parts: Sequence[Buffer], encoding: bytes) -> None:
        body = await _on_thread(lambda: compression.compress(parts, encoding))
        self.line.answered(self, status, headers, body)


def later(content: Callable[[Exchange, Route], Awaitable[Any]]) -> Handler:
    """A handler that answers what ``content`` returns as JSON; None is an empty answer."""

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


def infer(exchange: Exchange, route: Route) -> None:
    """``POST .../infer``."""
    shared = exchange.line.shared
    handle = shared.dataplane.acquire(route.model, route.version, exchange.client)
    request, exchange.form = shared.decode(handle, exchange.body, exchange.head.json_length)
    # The arrays hold on to the body as long as they need it.
    exchange.body = b""
    if exchange.client or exchange.head.traceparent:
        exchange.introduce(request)

    def done(outcome: Outcome) -> None:
        answer(exchange, handle, outcome)

    exchange.pending = shared.dataplane.infer(handle, request, done)


def answer(exchange: Exchange, handle: Handle, outcome: Outcome) -> None:
    """Encode the outcome of an inference request that ``handle`` answered."""
    if isinstance(outcome, PenstockError):
        exchange.fail(outcome)
        return
    shared = exchange.line.shared
    form = exchange.form
    try:
        if form.classification:
            classify_outputs(outcome, form.classification, handle)
        headers, text, tensors = shared.encode(outcome, form)
    except Exception as error:  # noqa: BLE001 - a bug of ours must not leave the client without an answer
        exchange.fail(exchange.as_error(error))
        return
    if exchange.head.accepted or form.lease is not None:
        exchange.reply(200, headers, text, tensors)
    else:
        exchange.line.answered(exchange, 200, headers, text, tensors)


async def _on_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work)
