"""One ``ModelStreamInfer`` call: any number of requests, each with its answers, or with an error that the stream survives."""

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


class _Question(msgspec.Struct, eq=False):
    """A request that has not had its last answer; or, of one that must wait for those before it, not sent it."""

    id: str
    form: AnswerForm
    size: int
    """Bytes of the server's budget that it holds."""
    handle: Handle | None = None
    """The model version that answers; None if there is none."""
    wants_empty_final: bool = False
    cancel: Callable[[], object] | None = None
    ready: list[Buffer] | None = None

    @property
    def decoupled(self) -> bool:
        return self.handle is not None and self.handle.decoupled


class InferStream:
    """Receives the requests. Those of one model are answered in order; a decoupled model's answers go out as they come."""

    def __init__(
        self, call: GrpcCall, client: str, inference: Inference, limit: int, ended: Callable[[InferStream], None]
    ) -> None:
        """``limit`` (>= 1) is the most requests that are worked on at once; more wait with the transport."""
        self._call = call
        self._client = client
        self._inference = inference
        self._limit = limit
        self._ended = ended
        self._ends_on_error = call.metadata.get("triton_grpc_error") == "true"
        self._questions: set[_Question] = set()
        self._in_order: dict[str, deque[_Question]] = {}
        self._is_open = True
        self._is_paused = False
        self._is_half_closed = False
        self._refusal: PenstockError | None = None
        """Why no more requests are taken."""
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
        if len(self._questions) >= self._limit and self._is_open and not self._is_paused:
            self._is_paused = True
            self._call.pause()

    def half_close(self) -> None:
        self._is_half_closed = True
        self._end_if_done()

    def drain(self, error: PenstockError) -> None:
        """Answer what has been asked, and no more: that is refused with ``error``."""
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
        question = _Question(request.id, form, size, handle, wants_empty_final)
        self._questions.add(question)
        if not question.decoupled:
            self._in_order.setdefault(name, deque()).append(question)

        def done(outcome: Outcome) -> None:
            self._answer(question, outcome, name)

        if handle is None:
            assert refusal is not None
            done(refusal)
            return
        pending = self._inference.submit(self._call, self._client, handle, request, done, decoupled=True)
        if pending is not None:
            question.cancel = pending.cancel

    def _answer(self, question: _Question, outcome: Outcome, model_name: str) -> None:
        """Send it, or keep it until it is its turn."""
        is_last = isinstance(outcome, PenstockError) or outcome.final
        if self._is_open:
            message = self._message(question, outcome)
            if isinstance(message, PenstockError):
                if self._ends_on_error:
                    self._release(question)
                    self._close()
                    self._call.finish(message)
                    return
                message = [streamed_error(message, question.id)]
            if not question.decoupled:
                question.ready = message
                self._send_in_order(model_name)
            elif message:
                self._call.send(*message)
        if is_last:
            self._release(question)
            if question.decoupled:
                self._questions.discard(question)
            self._go_on()

    def _release(self, question: _Question) -> None:
        """Give back what the request holds."""
        question.form.release()
        self._inference.budget.give(question.size)
        question.size = 0

    def _message(self, question: _Question, outcome: Outcome) -> list[Buffer] | PenstockError:
        """The answer as it is sent; empty for one that says nothing but that it was the last, unless asked for."""
        if isinstance(outcome, PenstockError):
            return outcome
        handle = question.handle
        assert handle is not None
        if handle.decoupled:
            if outcome.final and not outcome.outputs and not question.wants_empty_final:
                return []
            outcome.parameters = {**outcome.parameters, _FINAL: outcome.final}
        answer = self._inference.encode(handle, outcome, question.form)
        return answer if isinstance(answer, PenstockError) else streamed(answer)

    def _send_in_order(self, model_name: str) -> None:
        queue = self._in_order[model_name]
        while queue and queue[0].ready is not None:
            question = queue.popleft()
            self._questions.discard(question)
            self._call.send(*question.ready or ())
        if not queue:
            del self._in_order[model_name]

    def _refuse(self, error: PenstockError, identity: str) -> None:
        """Answer a request that was not even asked."""
        if self._ends_on_error:
            self._close()
            self._call.finish(error)
        else:
            self._call.send(streamed_error(error, identity))

    def _go_on(self) -> None:
        if self._is_paused and self._is_open and len(self._questions) < self._limit:
            self._is_paused = False
            self._call.resume()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_open and not self._questions and (self._is_half_closed or self._refusal is not None):
            self._close()
            self._call.finish(None if self._is_half_closed else self._refusal)

    def _close(self) -> None:
        """Cancel the requests that have not been answered."""
        if not self._is_open:
            return
        self._is_open = False
        self._ended(self)
        for question in tuple(self._questions):
            if question.cancel is not None:
                question.cancel()
