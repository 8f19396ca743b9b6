"""Inference over gRPC: the unary method, and the steps that it shares with streams."""

from __future__ import annotations

import logging
from functools import partial

from penstock.errors import PenstockError, Unavailable
from penstock.online.repository.handle import Handle
from penstock.online.scheduler.base import Cancellable
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.answer_form import AnswerForm
from penstock.online.server.classification import classify_outputs
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.call import GrpcCall
from penstock.online.server.grpc.decoder import GrpcRequestDecoder
from penstock.online.server.grpc.encoder import GrpcAnswerEncoder
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.tensor import Buffer

_log = logging.getLogger(__name__)


class Inference:
    """Passes requests to the data plane and answers back. Belongs to the event loop."""

    def __init__(self, dataplane: DataPlane, budget: ByteBudget | None = None) -> None:
        self.budget = budget or ByteBudget(0)
        """Counts the messages of streams until they are answered; the transport counts those of unary calls."""
        self.dataplane = dataplane
        self.decode = GrpcRequestDecoder(dataplane.shared_memory)
        self._write = GrpcAnswerEncoder()
        self._is_stopping = False

    def stop(self) -> None:
        """Refuse further requests."""
        self._is_stopping = True

    def check_open(self) -> None:
        """Raise Unavailable while the server is stopping."""
        if self._is_stopping:
            raise stopping()

    def submit(
        self, call: GrpcCall, client: str, handle: Handle, request: InferRequest, done: Done, decoupled: bool = False
    ) -> Cancellable | None:
        """Pass a request of ``call`` to the data plane; see ``DataPlane.infer``."""
        request.deadline, request.client = call.deadline, client
        if self.dataplane.tracer.enabled:
            request.traceparent = _header(call, "traceparent")
            request.tracestate = _header(call, "tracestate")
        return self.dataplane.infer(handle, request, done, decoupled)

    def encode(self, handle: Handle, response: InferResponse, form: AnswerForm) -> list[Buffer] | PenstockError:
        """The answer of ``handle`` as a ModelInferResponse in parts, or the error that prevented it."""
        try:
            if form.classification:
                classify_outputs(response, form.classification, handle)
            return self._write(response, form)
        except PenstockError as error:
            return error
        except Exception:  # noqa: BLE001 - the client needs an answer
            _log.exception("the answer could not be encoded")
            return PenstockError("internal error")

    def infer(self, call: GrpcCall, data: Buffer, client: str = "") -> None:
        """The unary method."""
        try:
            self.check_open()
            request, form = self.decode(data)
        except PenstockError as error:
            call.finish(error)
            return
        try:
            handle = self.dataplane.acquire(request.model_name, request.model_version, client)
        except PenstockError as error:
            form.release()
            call.finish(error)
            return
        pending = self.submit(call, client, handle, request, partial(self._answer, call, handle, form))
        if pending is not None:
            call.on_cancel = pending.cancel

    def _answer(self, call: GrpcCall, handle: Handle, form: AnswerForm, outcome: Outcome) -> None:
        answer = outcome if isinstance(outcome, PenstockError) else self.encode(handle, outcome, form)
        form.release()
        if isinstance(answer, PenstockError):
            call.finish(answer)
        else:
            call.send(*answer)
            call.finish()


def stopping() -> Unavailable:
    """The error for requests while the server stops. Clients look for Triton's wording."""
    return Unavailable("GRPC server is shutting down and has stopped accepting new requests.")


def _header(call: GrpcCall, name: str) -> str:
    value = call.metadata.get(name, "")
    return value if isinstance(value, str) else ""
