"""One call of ``ModelStreamInfer``. Each request on the stream gets responses, or an error that does not end the stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.repository.handle import Handle
from penstock.online.server.access.admission import ByteBudget, Reservation
from penstock.online.server.access.gate import Passage
from penstock.online.server.answer_form import AnswerForm
from penstock.online.server.dataplane import EMPTY_FINAL
from penstock.online.server.grpc.call import GrpcCall
from penstock.online.server.grpc.decoder import request_id
from penstock.online.server.grpc.encoder import streamed, streamed_error
from penstock.online.server.grpc.inference import Inference
from penstock.online.server.status import as_error
from penstock.online.server.to_thread import run
from penstock.request import InferRequest, Outcome
from penstock.tensor import Buffer

_FINAL = "triton_final_response"
_MAX_UNWRITTEN = 1024
"""Maximum number of responses that wait while an earlier response is being encoded on another thread."""


class _Held(Reservation):
    """A request's part of the server's budget, and its passage through the gate for large requests."""

    __slots__ = ("_passage",)

    def __init__(self, budget: ByteBudget) -> None:
        super().__init__(budget)
        self._passage = Passage(budget.gate)

    async def hold(self, size: int) -> None:
        """Wait until the request may hold ``size`` bytes in addition to its message, and reserve these bytes. Raises Unavailable."""
        await self._passage.hold(size)
        self.take(size)

    def park(self) -> None:
        """Record that the request now waits for its model."""
        self._passage.park(self._passage.size)

    def release(self) -> None:
        super().release()
        self._passage.leave()


class _Pending(msgspec.Struct, eq=False):
    """A request whose last response has not been sent."""

    id: str
    form: AnswerForm
    held: _Held
    handle: Handle | None = None
    """The model version that answers the request; None if it was not found."""
    wants_empty_final: bool = False
    cancel: Callable[[], object] | None = None
    ready: list[Buffer] | None = None
    """The response, while it waits for the responses to earlier requests."""

    @property
    def decoupled(self) -> bool:
        return self.handle is not None and self.handle.decoupled


class InferStream:
    """Receives the requests. Responses are sent in request order, except that responses of decoupled models are sent immediately."""

    def __init__(self, call: GrpcCall, inference: Inference, limit: int, ended: Callable[[InferStream], None]) -> None:
        """``limit`` (>= 1) is the maximum number of requests in progress. Further requests wait in the transport."""
        self._call = call
        self._inference = inference
        self._limit = limit
        self._ended = ended
        self._ends_on_error = call.metadata.get("triton_grpc_error") == "true"
        self._requests: set[_Pending] = set()
        self._in_order: dict[str, deque[_Pending]] = {}
        self._is_open = True
        self._is_paused = False
        self._is_half_closed = False
        self._reading: asyncio.Task[None] | None = None
        """The task that decodes a request. Later messages wait for it."""
        self._unwritten: deque[tuple[_Pending, Outcome, str]] = deque()
        """Outcomes in order. The first outcome is being encoded on another thread."""
        self._refusal: PenstockError | None = None
        """The error for further requests; None while requests are accepted."""
        call.on_cancel = self._close

    def admit(self, data: Buffer | None) -> bool:
        if not self._is_open:
            return False
        try:
            if self._refusal is not None:
                raise self._refusal
            self._inference.dataplane.enter(self._call.client)
        except PenstockError as error:
            self._refuse(error, "" if data is None else request_id(data))
            return False
        return True

    def message(self, data: Buffer) -> None:
        held = _Held(self._inference.budget)
        try:
            held.take(len(data))
            decoded = self._inference.decode(data, held.take)
        except PenstockError as error:
            self._decline(error, data, held)
            return
        if decoded is None:
            self._pause()
            self._reading = self._inference.start_large(self._call, len(data), self._read_later(data, held))
            # In a callback, because the task may be cancelled before it starts.
            self._reading.add_done_callback(lambda task: held.release() if task.cancelled() else None)
        else:
            self._ask(*decoded, held)
            if len(self._requests) >= self._limit and self._is_open and not self._is_paused:
                self._pause()

    def half_close(self) -> None:
        self._is_half_closed = True
        self._end_if_done()

    def drain(self, error: PenstockError) -> None:
        """Answer the requests in progress, and refuse further requests with ``error``."""
        self._refusal = error
        self._end_if_done()

    async def _read_later(self, data: Buffer, held: _Held) -> None:
        try:
            decoded = await self._inference.decode_later(data, self._call.client, held.hold)
        except Exception as error:  # noqa: BLE001 - the client needs an answer
            self._reading = None
            self._decline(as_error(error), data, held)
        else:
            self._reading = None
            held.park()
            self._ask(*decoded, held)
        self._go_on()

    def _ask(self, request: InferRequest, form: AnswerForm, held: _Held) -> None:
        name, wants_empty_final = request.model_name, request.parameters.get(EMPTY_FINAL) is True
        handle = refusal = None
        try:
            handle = self._inference.dataplane.acquire(name, request.model_version, self._call.client)
        except PenstockError as error:
            refusal = as_error(error)
        pending = _Pending(request.id, form, held, handle, wants_empty_final)
        self._requests.add(pending)
        if not pending.decoupled:
            self._in_order.setdefault(name, deque()).append(pending)

        def done(outcome: Outcome) -> None:
            self._answer(pending, outcome, name)

        if handle is None:
            assert refusal is not None
            done(refusal)
            return
        submitted = self._inference.submit(self._call, handle, request, done, decoupled=True)
        if submitted is not None:
            pending.cancel = submitted.cancel

    def _answer(self, pending: _Pending, outcome: Outcome, model_name: str) -> None:
        """Send ``outcome`` after all earlier outcomes."""
        message = None
        if not self._unwritten:
            message = self._message(pending, outcome, inline=True)
            if message is None:
                self._inference.start(self._write_later())
        elif len(self._unwritten) > _MAX_UNWRITTEN and self._is_open:
            self._close()
            self._call.finish(ResourceExhausted("the model produces responses faster than the server can encode them"))
        if message is None:
            self._unwritten.append((pending, outcome, model_name))
        else:
            self._answered(pending, outcome, model_name, message)

    async def _write_later(self) -> None:
        """Encode the waiting outcomes. Large outcomes are encoded on another thread."""
        while self._unwritten:
            pending, outcome, model_name = self._unwritten[0]
            message = self._message(pending, outcome, inline=True)
            if message is None:
                message = await run(partial(self._message, pending, outcome)) or []
            self._answered(pending, outcome, model_name, message)
            self._unwritten.popleft()

    def _answered(
        self, pending: _Pending, outcome: Outcome, model_name: str, message: list[Buffer] | PenstockError
    ) -> None:
        """Send ``message``, the encoded outcome, or keep it until all earlier requests are answered."""
        is_last = isinstance(outcome, PenstockError) or outcome.final
        if self._is_open:
            if isinstance(message, PenstockError):
                if self._ends_on_error:
                    self._release(pending)
                    self._close()
                    self._call.finish(message)
                    return
                message = [streamed_error(message, pending.id)]
            if not pending.decoupled:
                pending.ready = message
                self._send_in_order(model_name)
            elif message:
                self._call.send(*message)
        if is_last:
            self._release(pending)
            if pending.decoupled:
                self._requests.discard(pending)
            self._go_on()

    def _release(self, pending: _Pending) -> None:
        """Release the request's shared memory and budget."""
        pending.form.release()
        pending.held.release()

    def _message(
        self, pending: _Pending, outcome: Outcome, inline: bool = False
    ) -> list[Buffer] | PenstockError | None:
        """Encode ``outcome``. For ``inline``, see ``encode``. The result is empty for a final response without outputs, unless the
        client has requested such responses.
        """
        if isinstance(outcome, PenstockError) or not self._is_open:
            return outcome if isinstance(outcome, PenstockError) else []
        handle = pending.handle
        assert handle is not None
        if handle.decoupled:
            if outcome.final and not outcome.outputs and not pending.wants_empty_final:
                return []
            outcome.parameters = {**outcome.parameters, _FINAL: outcome.final}
        answer = self._inference.encode(handle, outcome, pending.form, inline)
        return streamed(answer) if isinstance(answer, list) else answer

    def _send_in_order(self, model_name: str) -> None:
        queue = self._in_order[model_name]
        while queue and queue[0].ready is not None:
            pending = queue.popleft()
            self._requests.discard(pending)
            self._call.send(*pending.ready or ())
        if not queue:
            del self._in_order[model_name]

    def _refuse(self, error: PenstockError, identity: str) -> None:
        """Send ``error`` for a request that was not passed to the data plane."""
        if self._ends_on_error:
            self._close()
            self._call.finish(error)
        else:
            self._call.send(streamed_error(error, identity))

    def _decline(self, error: PenstockError, data: Buffer, held: _Held) -> None:
        held.release()
        self._refuse(error, request_id(data))

    def _pause(self) -> None:
        self._is_paused = True
        self._call.pause()

    def _go_on(self) -> None:
        if self._is_paused and self._is_open and self._reading is None and len(self._requests) < self._limit:
            self._is_paused = False
            self._call.resume()
        self._end_if_done()

    def _end_if_done(self) -> None:
        is_done = not self._requests and self._reading is None
        if self._is_open and is_done and (self._is_half_closed or self._refusal is not None):
            self._close()
            self._call.finish(None if self._is_half_closed else self._refusal)

    def _close(self) -> None:
        """Cancel the requests that have not been answered."""
        if not self._is_open:
            return
        self._is_open = False
        self._ended(self)
        if self._reading is not None:
            self._reading.cancel()
        for pending in tuple(self._requests):
            if pending.cancel is not None:
                pending.cancel()
