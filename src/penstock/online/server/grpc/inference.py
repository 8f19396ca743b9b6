"""Inference over gRPC: the unary method, and the functions that unary calls and streams share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from penstock.errors import PenstockError, Unavailable
from penstock.online.repository.handle import Handle
from penstock.online.scheduler.base import Cancellable
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.gate import SMALL_BYTES
from penstock.online.server.answer_form import AnswerForm
from penstock.online.server.classification import classify_outputs
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.call import GrpcCall
from penstock.online.server.grpc.decoder import INLINE_BYTES, GrpcRequestDecoder
from penstock.online.server.grpc.encoder import GrpcAnswerEncoder
from penstock.online.server.status import as_error
from penstock.online.server.to_thread import run
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.tensor import Buffer


class Inference:
    """Passes requests to the data plane, and sends the responses. Used only on the event loop."""

    def __init__(self, dataplane: DataPlane, budget: ByteBudget | None = None) -> None:
        self.budget = budget or ByteBudget(0)
        """Counts the bytes of stream messages until they are answered. The transport counts the messages of unary calls."""
        self.dataplane = dataplane
        self._decoder = GrpcRequestDecoder(dataplane.shared_memory)
        self.decode = self._decoder.inline
        self._write = GrpcAnswerEncoder(dataplane.response_limit)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def stop(self) -> None:
        """Refuse further requests."""
        self._is_stopping = True

    def check_open(self) -> None:
        """Raise Unavailable while the server is stopping."""
        if self._is_stopping:
            raise stopping()

    async def decode_later(
        self, data: Buffer, client: str, hold: Callable[[int], Awaitable[None]]
    ) -> tuple[InferRequest, AnswerForm]:
        """Decode a request of ``client`` on another thread. Call this if ``decode`` has returned None for the request.

        An invalid request is refused before its tensors are decoded. ``hold`` waits until there is memory for the tensors.
        """
        opened, data = await run(partial(self._decoder.open, data))
        self.dataplane.check(opened.outline(data), client)
        await hold(opened.produced)
        return self._decoder.finish(opened, data, await run(partial(opened.arrays, data)))

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` as a task. ``work`` must not raise an exception."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def start_large(self, call: GrpcCall, size: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Like ``start``, for work on ``size`` bytes of ``call``. Further large calls of the connection wait until ``work`` ends."""
        call.occupy(size)
        task = self.start(work)
        # In a callback, because the task may be cancelled before it starts.
        task.add_done_callback(lambda _: call.occupy(-size))
        return task

    def submit(
        self, call: GrpcCall, handle: Handle, request: InferRequest, done: Done, decoupled: bool = False
    ) -> Cancellable | None:
        """Pass a request of ``call`` to the data plane. See ``DataPlane.infer``."""
        request.deadline, request.client = call.deadline, call.client
        request.origin = call.client or id(call.carrier)
        if self.dataplane.tracer.enabled:
            request.traceparent = _header(call, "traceparent")
            request.tracestate = _header(call, "tracestate")
        return self.dataplane.infer(handle, request, done, decoupled)

    def encode(
        self, handle: Handle, response: InferResponse, form: AnswerForm, inline: bool = False
    ) -> list[Buffer] | PenstockError | None:
        """Encode a response of ``handle`` as a ModelInferResponse in parts. Returns an error if encoding fails.

        With ``inline``, returns None if encoding would take too long on the event loop. Otherwise, this may run on any thread.
        """
        try:
            if form.classification:
                if inline and sum(array.nbytes for array in response.outputs.values()) > INLINE_BYTES:
                    return None
                classify_outputs(response, form.classification, handle)
            return self._write(response, form, inline)
        except Exception as error:  # noqa: BLE001 - the client needs an answer
            return as_error(error)

    def infer(self, call: GrpcCall, data: Buffer) -> None:
        """The unary method ``ModelInfer``."""
        try:
            if self._is_stopping:
                raise stopping()
            decoded = self.decode(data, call.reserve)
        except PenstockError as error:
            call.finish(error)
            return
        if decoded is not None:
            request, form = decoded
            self._ask(call, request, form)
            return
        call.on_cancel = self.start_large(call, len(data), self._infer_later(call, data)).cancel

    async def _infer_later(self, call: GrpcCall, data: Buffer) -> None:
        try:
            decoded = await self.decode_later(data, call.client, call.hold)
        except Exception as error:  # noqa: BLE001 - the client needs an answer
            call.finish(as_error(error))
        else:
            call.on_cancel = None
            call.park()
            self._ask(call, *decoded)

    def _ask(self, call: GrpcCall, request: InferRequest, form: AnswerForm) -> None:
        try:
            handle = self.dataplane.acquire(request.model_name, request.model_version, call.client)
        except PenstockError as error:
            form.release()
            call.finish(error)
            return
        if handle.row_bytes and (size := handle.amplified_bytes(request)) > SMALL_BYTES:
            handle.hold()
            task = self.start_large(call, size, self._ask_later(call, handle, request, form, size))
            # This is not done in the task, because the task may be cancelled before it begins.
            task.add_done_callback(partial(_end_wait, handle, form))
            call.on_cancel = task.cancel
            return
        pending = self.submit(call, handle, request, partial(self._answer, call, handle, form))
        if pending is not None:
            call.on_cancel = pending.cancel

    async def _ask_later(
        self, call: GrpcCall, handle: Handle, request: InferRequest, form: AnswerForm, size: int
    ) -> None:
        """Pass on ``request`` once there is memory for its answer of ``size`` bytes, which the client may leave unread."""
        try:
            await call.hold(size)
        except PenstockError as error:
            _finish(call, form, error)
            return
        call.park()
        call.on_cancel = None
        pending = self.submit(call, handle, request, partial(self._answer, call, handle, form))
        if pending is not None:
            call.on_cancel = pending.cancel

    def _answer(self, call: GrpcCall, handle: Handle, form: AnswerForm, outcome: Outcome) -> None:
        if isinstance(outcome, PenstockError):
            _finish(call, form, outcome)
            return
        answer = self.encode(handle, outcome, form, True)
        if type(answer) is list:  # the common case of ``_finish``
            form.release()
            call.send(*answer)
            call.finish()
        elif answer is None:
            self.start(self._answer_later(call, handle, form, outcome))
        else:
            _finish(call, form, answer)

    async def _answer_later(self, call: GrpcCall, handle: Handle, form: AnswerForm, response: InferResponse) -> None:
        answer = await run(partial(self.encode, handle, response, form))
        assert answer is not None
        _finish(call, form, answer)


def _end_wait(handle: Handle, form: AnswerForm, task: asyncio.Task[None]) -> None:
    handle.release()
    if task.cancelled():
        form.release()


def _finish(call: GrpcCall, form: AnswerForm, answer: list[Buffer] | PenstockError) -> None:
    form.release()
    if isinstance(answer, PenstockError):
        call.finish(answer)
    else:
        call.send(*answer)
        call.finish()


def stopping() -> Unavailable:
    """The error for requests while the server stops. Clients rely on Triton's wording."""
    return Unavailable("GRPC server is shutting down and has stopped accepting new requests.")


def _header(call: GrpcCall, name: str) -> str:
    value = call.metadata.get(name, "")
    return value if isinstance(value, str) else ""
