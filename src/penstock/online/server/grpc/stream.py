"""One call of ``ModelStreamInfer``: any number of requests, each with answers, or with an error that does not end the stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from penstock.errors import PenstockError
from penstock.online.repository.handle import Handle
from penstock.online.server.answer_form import AnswerForm
from penstock.online.server.grpc.call import GrpcCall
from penstock.online.server.grpc.decoder import request_id
from penstock.online.server.grpc.encoder import streamed, streamed_error
from penstock.online.server.grpc.inference import Inference
from penstock.request import InferRequest, Outcome
from penstock.tensor import Buffer

_EMPTY_FINAL = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"


class _Pending(msgspec.Struct, eq=False):
    """A request whose last answer has not been sent."""

    id: str
    form: AnswerForm
    size: int
    """Bytes that the request takes of the server's budget."""
    handle: Handle | None = None
    """The model version that answers; None if it was not found."""
    wants_empty_final: bool = False
    cancel: Callable[[], object] | None = None
    ready: list[Buffer] | None = None
    """The answer, while it waits for those of earlier requests."""

    @property
    def decoupled(self) -> bool:
        return self.handle is not None and self.handle.decoupled


class InferStream:
    """Receives the requests. A model's requests are answered in order; a decoupled model's answers are sent at once."""

    def __init__(
        self, call: GrpcCall, client: str, inference: Inference, limit: int, ended: Callable[[InferStream], None]
    ) -> None:
        """``limit`` (>= 1): maximum requests in progress; further ones wait in the transport."""
        self._call = call
        self._client = client
        self._inference = inference
        self._limit = limit
        self._ended = ended
        self._ends_on_error = call.metadata.get("triton_grpc_error") == "true"
        self._requests: set[_Pending] = set()
        self._in_order: dict[str, deque[_Pending]] = {}
        self._is_open = True
        self._is_paused = False
        self._is_half_closed = False
        self._refusal: PenstockError | None = None
        """The error for further requests; None while they are accepted."""
        call.on_cancel = self._close

    def message(self, data: Buffer) -> None:
        if not self._is_open:
            return
        try:
            if self._refusal is not None:
                raise self._refusal
            request, form = self._inference.decode(data)
            if not self._inference.budget.take(len(data)):
                form.release()
                raise self._inference.budget.refusal()
        except PenstockError as error:
            self._refuse(error, request_id(data))
            return
        self._ask(request, form, len(data))
        if len(self._requests) >= self._limit and self._is_open and not self._is_paused:
            self._is_paused = True
            self._call.pause()

    def half_close(self) -> None:
        self._is_half_closed = True
        self._end_if_done()

    def drain(self, error: PenstockError) -> None:
        """Answer the requests in progress, and refuse further ones with ``error``."""
        self._refusal = error
        self._end_if_done()

    def _ask(self, request: InferRequest, form: AnswerForm, size: int) -> None:
        name, wants_empty_final = request.model_name, False
        if _EMPTY_FINAL in request.parameters:
            parameters = request.parameters.copy()
            wants_empty_final = parameters.pop(_EMPTY_FINAL) is True
            request.parameters = parameters
        handle = refusal = None
        try:
            handle = self._inference.dataplane.acquire(name, request.model_version, self._client)
        except PenstockError as error:
            refusal = error
        pending = _Pending(request.id, form, size, handle, wants_empty_final)
        self._requests.add(pending)
        if not pending.decoupled:
            self._in_order.setdefault(name, deque()).append(pending)

        def done(outcome: Outcome) -> None:
            self._answer(pending, outcome, name)

        if handle is None:
            assert refusal is not None
            done(refusal)
            return
        submitted = self._inference.submit(self._call, self._client, handle, request, done, decoupled=True)
        if submitted is not None:
            pending.cancel = submitted.cancel

    def _answer(self, pending: _Pending, outcome: Outcome, model_name: str) -> None:
        """Send the outcome, or keep it until earlier requests are answered."""
        is_last = isinstance(outcome, PenstockError) or outcome.final
        if self._is_open:
            message = self._message(pending, outcome)
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
        self._inference.budget.give(pending.size)
        pending.size = 0

    def _message(self, pending: _Pending, outcome: Outcome) -> list[Buffer] | PenstockError:
        """The message to send; empty if it would only mark the end, unless the client asked for that."""
        if isinstance(outcome, PenstockError):
            return outcome
        handle = pending.handle
        assert handle is not None
        if handle.decoupled:
            if outcome.final and not outcome.outputs and not pending.wants_empty_final:
                return []
            outcome.parameters = {**outcome.parameters, _FINAL: outcome.final}
        answer = self._inference.encode(handle, outcome, pending.form)
        return answer if isinstance(answer, PenstockError) else streamed(answer)

    def _send_in_order(self, model_name: str) -> None:
        queue = self._in_order[model_name]
        while queue and queue[0].ready is not None:
            pending = queue.popleft()
            self._requests.discard(pending)
            self._call.send(*pending.ready or ())
        if not queue:
            del self._in_order[model_name]

    def _refuse(self, error: PenstockError, identity: str) -> None:
        """Answer a request that was not passed to the data plane."""
        if self._ends_on_error:
            self._close()
            self._call.finish(error)
        else:
            self._call.send(streamed_error(error, identity))

    def _go_on(self) -> None:
        if self._is_paused and self._is_open and len(self._requests) < self._limit:
            self._is_paused = False
            self._call.resume()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_open and not self._requests and (self._is_half_closed or self._refusal is not None):
            self._close()
            self._call.finish(None if self._is_half_closed else self._refusal)

    def _close(self) -> None:
        """Cancel the requests that have not been answered."""
        if not self._is_open:
            return
        self._is_open = False
        self._ended(self)
        for pending in tuple(self._requests):
            if pending.cancel is not None:
                pending.cancel()
