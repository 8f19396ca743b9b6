"""One HTTP request, from its parsed head to its response, and the methods that handlers use to respond."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
import orjson

from penstock.errors import Cancelled, Code, InvalidArgument, PenstockError, bounded
from penstock.online.repository.handle import Handle
from penstock.online.scheduler.base import Cancellable
from penstock.online.server import status
from penstock.online.server.access.gate import SMALL_BYTES, Passage
from penstock.online.server.answer_form import TEXT, AnswerForm
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http import compression
from penstock.online.server.http.answer import JSON, Answer
from penstock.online.server.http.codec.encoder import encode_error
from penstock.online.server.http.context import HttpContext
from penstock.online.server.http.head import RequestHead
from penstock.online.server.http.routes import Route
from penstock.online.server.network.turns import CONTROL_UNITS, STEP_UNITS
from penstock.online.server.to_thread import INLINE_BYTES, Steps, beside, finish, in_steps, run
from penstock.request import Done, InferRequest
from penstock.tensor import Array, Buffer

_Body = TypeVar("_Body")
_Result = TypeVar("_Result")

_MIN_COMPRESSED = 4096
_MAX_MEMBERS = 1 << 16
_SLICE = 64 << 10
_RETRY_AFTER_S = 1.0
_PREFLIGHT = b"Access-Control-Allow-Methods: %b\r\nAccess-Control-Allow-Headers: *, Authorization\r\nAccess-Control-Max-Age: 600\r\n"
_BUSY = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)


class AnswerSink(Protocol):
    """The part of a connection's interface that an exchange uses. It sends the response, whole or as a stream."""

    context: HttpContext
    lane: asyncio.Lock
    """A request holds this lock while the request waits for its turn or runs a step on another thread. Hundreds of requests on one
    connection therefore delay other connections no more than one request would. A request that holds the lock must not wait for
    other requests of the connection, because they may need the lock."""

    def answered(
        self, exchange: Exchange, status: int, headers: bytes, body: bytes, tensors: Sequence[Buffer] = ()
    ) -> None:
        """Send the whole response. Each line of ``headers`` ends with CRLF."""

    def begin_stream(self, exchange: Exchange, headers: bytes) -> None:
        """Begin a response of status 200 that is sent in pieces. Each line of ``headers`` ends with CRLF."""

    def send(self, exchange: Exchange, data: bytes) -> None:
        """Send ``data``, which must not be empty. If too much data is unread, disconnect the client and cancel the request."""

    def end_stream(self, exchange: Exchange) -> None:
        """End the stream."""


class Exchange(msgspec.Struct, eq=False):
    """A received request and its response, which is sent whole or as a stream."""

    sink: AnswerSink
    head: RequestHead
    body: Buffer = b""
    keep_alive: bool = True
    reserved_bytes: int = 0
    """Bytes taken from the server's budget for bodies. The connection returns these bytes when it sends the response."""
    passage: Passage | None = None
    """The ``Passage`` that counts the memory of a large request (see ``access/gate.py``). The connection ends it when it sends the
    response. None while the request does not need the gate.
    """
    client: str = ""
    """The client's name in the keys file."""
    is_checked: bool = False
    """True once ``admit`` has run. ``refusal`` then holds the error, or None if access was not denied."""
    refusal: PenstockError | None = None
    """The error to send as the response. If set, the handler is not called."""
    form: AnswerForm = TEXT
    pending: Cancellable | None = None
    """Cancels the inference."""
    answer: Answer | None = None
    """The response, while it waits for the responses to earlier requests."""
    is_streaming: bool = False
    """True while a streamed response is incomplete."""
    is_gone: bool = False
    """True if the client has disconnected."""

    def admit(self) -> bool:
        """Check URL, method and the client's rights before the body arrives. Returns False if ``run`` will refuse the request."""
        head = self.head
        self.is_checked = True
        if head.handler is None:
            return False
        if head.route.guard is not None:
            try:
                self.client = head.route.guard(head.credential, head.keys, head.route.model)
            except Exception as error:  # noqa: BLE001 - a bug must not affect the other requests
                self.refusal = status.as_error(error)
        return self.refusal is None

    def run(self) -> None:
        """Check access, unless ``admit`` has already done this. Then call the handler, which answers immediately or later."""
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
            if self.refusal is not None:
                self.fail(self.refusal)
                return
            guard = head.route.guard
            if guard is not None and not self.is_checked:
                self.client = guard(head.credential, head.keys, head.route.model)
            if head.encoding and not compression.knows(head.encoding):
                self._refuse_encoding()
                return
            handler(self, head.route)
        except Exception as error:  # noqa: BLE001 - a bug must not affect the other requests
            self.fail_unexpected(error)

    def cancel(self) -> None:
        """Cancel the request, because the client has disconnected. A batch that is already running continues."""
        self.is_gone = True
        if self.passage is not None:
            self.passage.cancel()
        if self.pending is not None:
            self.pending.cancel()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` as a task. ``work`` answers the request. If it raises an exception, the exception becomes the response."""

        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - as in ``run``
                self.fail_unexpected(error)

        self.sink.context.start(run())

    def decode(self, read: Callable[[Buffer], Steps[_Result]], start: Callable[[_Result, bool], None]) -> None:
        """Decode the body with ``read``, then call ``start`` on the event loop. For a small body, both happen immediately.

        The second argument of ``start`` is True if ``start`` is called later. The model may then have been replaced. The exchange
        releases the body before ``start`` is called.
        """
        if (body := self.small_body()) is None:
            self.later(self._decode_later(read, start))
        else:
            self.body = b""
            start(finish(read(body)), False)

    def small_body(self) -> Buffer | None:
        """The decompressed content of a small body; None for a large body."""
        encoding = self.head.encoding
        if encoding:
            return compression.inflate_small(self.body, encoding)
        return self.body if len(self.body) <= INLINE_BYTES else None

    async def _decode_later(
        self, read: Callable[[Buffer], Steps[_Result]], start: Callable[[_Result, bool], None]
    ) -> None:
        start(await self.decoded(read), True)

    async def decoded(self, read: Callable[[Buffer], Steps[_Result]]) -> _Result:
        """Decompress the body and decode it with ``read`` on other threads. Memory is reserved before each step.

        Raises Cancelled once the client has disconnected.
        """
        body, self.body = self.body, b""
        held = len(body)
        limit = self.sink.context.limit_of(self.head)
        steps = _decompressed(body, self.head.encoding, limit, read) if self.head.encoding else read(body)

        async def charge(size: int) -> None:
            await self._hold(held + size)
            self._reserve(held + size)

        return await self._in_steps(steps, charge)

    def await_model(self, inputs: Mapping[str, Array]) -> None:
        """Reduce the memory reservation to the decoded ``inputs`` until the model has answered."""
        if self.passage is None:
            return
        size = self.passage.size
        if self.head.json_length is None and not any(array.dtype.hasobject for array in inputs.values()):
            # No array refers to the body's text any more.
            size = min(size, sum(array.nbytes for array in inputs.values()))
            self.sink.context.give_back(self.reserved_bytes - size)
            self.reserved_bytes = size
        self.passage.park(size)

    def submit(
        self, dataplane: DataPlane, handle: Handle, request: InferRequest, done: Done, decoupled: bool = False
    ) -> None:
        """Pass ``request`` to ``dataplane``. If outputs are much larger than inputs, first wait for memory for the outputs."""
        if not handle.decoupled and (size := handle.amplified_bytes(request)) > SMALL_BYTES:
            handle.hold()
            self.later(self._submit_later(dataplane, handle, request, done, decoupled, size))
        else:
            self.pending = dataplane.infer(handle, request, done, decoupled)

    async def _submit_later(
        self, dataplane: DataPlane, handle: Handle, request: InferRequest, done: Done, decoupled: bool, size: int
    ) -> None:
        try:
            held = size if self.passage is None else self.passage.size + size
            await self._hold(held)
            assert self.passage is not None
            self.passage.park(held)
            self.pending = dataplane.infer(handle, request, done, decoupled)
        finally:
            handle.release()

    def await_more(self, size: int) -> None:
        """Until the model's next response, count ``size`` bytes for responses that wait to be sent."""
        if self.passage is not None:
            self.passage.park(size)

    async def encoded(self, arrays: Iterable[Array], steps: Steps[_Result]) -> _Result:
        """Run ``steps``, which encode the model's outputs ``arrays``, and return the result."""
        held = sum(array.nbytes for array in arrays)
        if self.passage is None and held > SMALL_BYTES:
            self.passage = Passage(self.sink.context.budget.gate)
        if self.passage is not None:
            self.passage.note(held)
        return await self._in_steps(steps, lambda size: self._hold(held + size))

    async def begin_control(self) -> None:
        """Wait for the turn of this control-plane request."""
        async with self.sink.lane:
            await self.sink.context.connections.turns.wait(CONTROL_UNITS)

    async def _in_steps(self, steps: Steps[_Result], charge: Callable[[int], Awaitable[None]]) -> _Result:
        result = await in_steps(steps, charge, self._turn)
        self._check_client()
        return result

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """The request's turn for one step. Raises Cancelled."""
        async with self.sink.lane:
            self._check_client()
            self.sink.context.connections.turns.spend(STEP_UNITS)
            yield

    def _check_client(self) -> None:
        if self.is_gone:
            raise Cancelled("the client has disconnected")

    async def _hold(self, size: int) -> None:
        """Wait until the request may hold ``size`` bytes. Raises Cancelled."""
        self._check_client()
        if size > SMALL_BYTES:
            if self.passage is None:
                self.passage = Passage(self.sink.context.budget.gate)
            await self.passage.hold(size)

    async def read(self, kind: type[_Body]) -> _Body:
        """Decode the JSON body as ``kind``. An empty body counts as an empty object. Raises InvalidArgument."""
        decoder: msgspec.json.Decoder[_Body] = _decoder(
            kind
        )  # on the event loop, because other threads must not be the first to use a type
        if self.head.encoding:
            self.body = await self.decoded(_as_it_is)
        if len(self.body) <= INLINE_BYTES:
            return self._read(decoder)
        # Memory for the body itself, for its texts, and for the decoded objects.
        self._reserve(3 * len(self.body))
        return await run(functools.partial(self._read, decoder))

    def _read(self, decoder: msgspec.json.Decoder[_Body]) -> _Body:
        view = memoryview(self.body)
        if sum(bytes(view[start : start + _SLICE]).count(b",") for start in range(0, len(view), _SLICE)) > _MAX_MEMBERS:
            raise InvalidArgument(f"the body has more than {_MAX_MEMBERS} members")
        try:
            return decoder.decode(self.body or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"invalid request body: {error}") from None
        except RecursionError:
            raise InvalidArgument("the body's JSON is nested too deeply") from None

    def reply(self, status: int, headers: bytes, body: bytes = b"", tensors: Sequence[Buffer] = ()) -> None:
        """Send the response. It is compressed if the client prefers compression and the response is large enough."""
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
        headers += compression.headers(encoding)

        async def compress() -> None:
            compressed = await self._in_steps(
                compression.compress(parts, encoding), lambda done: self._hold(size + done)
            )
            self.sink.answered(self, status, headers, compressed)

        self.later(compress())

    def reply_json(self, content: Any, status: int = 200) -> None:
        """Answer with ``content`` as JSON, never compressed.

        Only inference responses are compressed, because ``tritonclient.http.aio`` announces that it accepts compression of all
        responses, but decompresses only inference responses.
        """
        self.sink.answered(self, status, JSON, orjson.dumps(content))

    def reply_empty(self) -> None:
        self.sink.answered(self, 200, JSON, b"")

    def fail(self, error: PenstockError) -> None:
        """Answer with ``error``, and with the status and headers for this error."""
        headers = b""
        code: int = getattr(error, "http_status", status.HTTP[error.code])
        if error.code in _BUSY and code == status.HTTP[error.code]:
            seconds = _RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
            headers = b"Retry-After: %d\r\n" % max(1, math.ceil(seconds))
        elif error.code is Code.UNAUTHENTICATED:
            headers = b"WWW-Authenticate: Bearer\r\n"
        self.fail_with(code, str(error), headers)

    def fail_with(self, status: int, message: str, headers: bytes = b"") -> None:
        """Answer with an error."""
        error = self.head.route.error
        body = encode_error(message) if error is None else error(status, bounded(message))
        self.reply(status, JSON + headers, body)

    def fail_unexpected(self, error: Exception) -> None:
        """Answer with ``error``. An error that is not a PenstockError is logged and reported as an internal error."""
        self.fail(status.as_error(error))

    def introduce(self, request: InferRequest) -> None:
        """Set the client and the trace context of ``request``."""
        request.client = self.client
        request.origin = self.client or id(self.sink)
        head = self.head
        if head.traceparent:
            request.traceparent, request.tracestate = head.traceparent, head.tracestate

    def _refuse_encoding(self) -> None:
        accept = b"Accept-Encoding: %b\r\n" % compression.ENCODINGS
        self.fail_with(501, "unknown Content-Encoding of the body: use gzip, deflate or none", accept)

    def _reserve(self, size: int) -> None:
        """Increase the reservation to ``size`` bytes. Raises Unavailable."""
        self.reserved_bytes += self.sink.context.reserve(size, self.reserved_bytes)


_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(msgspec.json.Decoder)


def _as_it_is(body: Buffer) -> Steps[Buffer]:
    yield 0
    return body


def _decompressed(
    body: Buffer, encoding: bytes, limit: int, read: Callable[[Buffer], Steps[_Result]]
) -> Steps[_Result]:
    whole = yield from compression.inflate(body, encoding, limit)
    return (yield from beside(len(whole), read(whole)))


def later(content: Callable[[Any, Exchange, Route], Awaitable[Any]]) -> Callable[[Any, Exchange, Route], None]:
    """Convert a coroutine method to a handler that answers with the method's result as JSON. None becomes an empty response."""

    async def answer(self: Any, exchange: Exchange, route: Route) -> None:
        await exchange.begin_control()
        result = await content(self, exchange, route)
        if result is None:
            exchange.reply_empty()
        else:
            exchange.reply_json(result)

    @functools.wraps(content)
    def handle(self: Any, exchange: Exchange, route: Route) -> None:
        exchange.later(answer(self, exchange, route))

    return handle
