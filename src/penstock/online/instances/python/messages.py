"""Requests and responses of Triton Python models. A model receives requests and creates responses. It can also call other models."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from penstock.errors import (
    AlreadyExists,
    Cancelled,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from penstock.online.instances.python.host import here
from penstock.online.instances.python.tensors import TritonModelException, TritonTensor
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.tensor import Array

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

_SEQUENCE = "sequence_id"
_FLAGS = {
    "sequence_start": TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    "sequence_end": TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
}
_UNREAD = 1024
"""Maximum number of unread responses to one call of a decoupled model."""


class TritonError:
    """The error of a request; ``code`` is one of the constants."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = str(message)
        self._code = code

    def code(self) -> int:
        return self._code

    def message(self) -> str:
        return self._message

    def __str__(self) -> str:
        return self._message


_ERRORS: dict[int, type[PenstockError]] = {
    TritonError.NOT_FOUND: NotFound,
    TritonError.INVALID_ARG: InvalidArgument,
    TritonError.UNAVAILABLE: Unavailable,
    TritonError.UNSUPPORTED: Unsupported,
    TritonError.ALREADY_EXISTS: AlreadyExists,
    TritonError.CANCELLED: Cancelled,
}


class PreferredMemory:
    """Accepted but ignored, because all tensors are in main memory."""

    def __init__(self, *_: int) -> None: ...


class InferenceResponse:
    """The outputs of a request, or its error."""

    def __init__(
        self,
        output_tensors: Sequence[TritonTensor] = (),
        error: TritonError | str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if not all(isinstance(tensor, TritonTensor) for tensor in output_tensors):
            raise TritonModelException("'output_tensors' must be a list of Tensor objects")
        self._tensors = list(output_tensors)
        self._error = TritonError(error) if isinstance(error, str) else error
        self._parameters = dict(parameters or {})  # clients do not receive them

    @classmethod
    def of(cls, outcome: Outcome) -> InferenceResponse:
        """Create a response from the outcome of a call to another model."""
        if isinstance(outcome, InferResponse):
            return cls([TritonTensor(name, array) for name, array in outcome.outputs.items()], None, outcome.parameters)
        code = next((code for code, kind in _ERRORS.items() if isinstance(outcome, kind)), TritonError.INTERNAL)
        return cls(error=TritonError(str(outcome), code))

    def output_tensors(self) -> list[TritonTensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def outcome(self) -> dict[str, Array] | PenstockError:
        """Convert the response to the server's form."""
        if self._error is not None:
            return _ERRORS.get(self._error.code(), PenstockError)(self._error.message())
        return {tensor.name(): tensor.as_numpy() for tensor in self._tensors}


class ResponseSender:
    """Sends responses to one request, from any thread, until the final flag. Calls ``lost`` if the model drops it earlier."""

    def __init__(self, send: Callable[[InferenceResponse | None, bool], bool], lost: Callable[[], object]) -> None:
        self._send, self._lost = send, lost
        self._lock = threading.Lock()
        self.closed = False
        """True once the request has ended."""
        self._is_wanted = True
        """False once the client no longer waits for responses. Responses are then dropped here, to save the copy of sending."""

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send ``response``. Blocks until the server has received the response."""
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(f"unable to send response: unknown flags {flags}")
        if response is None and not flags:
            raise TritonModelException("unable to send response: without a response, the final flag must be set")
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(
                f"unable to send response: expected an InferenceResponse, got {type(response).__name__}"
            )
        with self._lock:
            if self.closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self.closed = bool(flags)
            if self._is_wanted or flags:
                self._is_wanted = self._send(response if self._is_wanted else None, bool(flags))

    def is_cancelled(self) -> bool:
        """True if the client has cancelled the request."""
        return not self._send(None, False)

    def __del__(self) -> None:
        if not self.closed:
            here.host.later(self._lost)


class InferenceRequest:
    """A request that the model has received, or has created to call another model."""

    def __init__(  # noqa: PLR0913, PLR0917 - Triton's interface
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[TritonTensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: object = None,
        parameters: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> None:
        if not all(isinstance(tensor, TritonTensor) for tensor in inputs):
            raise TritonModelException("'inputs' must be a list of Tensor objects")
        self._id, self._correlation_id, self._inputs = _text(request_id), correlation_id, list(inputs)
        self._outputs = [_text(name) for name in requested_output_names]
        self._model, self._version = _text(model_name), model_version
        self._flags, self._timeout, self._priority = flags, timeout, priority
        self._memory = preferred_memory or PreferredMemory()
        self._parameters = dict(parameters or {})
        self.sender: ResponseSender | None = None
        """None for a request that the model has created."""

    @classmethod
    def of(cls, request: InferRequest, output_names: Sequence[str], sender: ResponseSender) -> InferenceRequest:
        """Convert the server's request for the model. If the client names no outputs, all ``output_names`` are requested."""
        given = request.parameters
        one = cls(
            request_id=request.id,
            correlation_id=given.get(_SEQUENCE, 0),
            inputs=[TritonTensor(name, array) for name, array in request.inputs.items()],
            requested_output_names=request.outputs or output_names,
            model_name=request.model_name,
            model_version=int(request.model_version or 0),
            flags=sum(flag for name, flag in _FLAGS.items() if given.get(name)),
            timeout=request.timeout_us,
            parameters={name: value for name, value in given.items() if name != _SEQUENCE and name not in _FLAGS},
            priority=request.priority,
        )
        one.sender = sender
        return one

    def inputs(self) -> list[TritonTensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def parameters(self) -> str:
        """The parameters as JSON."""
        return json.dumps(self._parameters)

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """The timeout in microseconds."""
        return self._timeout

    def priority(self) -> int:
        return self._priority

    def preferred_memory(self) -> PreferredMemory:
        return self._memory

    def trace(self) -> None:
        """Always None, because the server itself traces calls of other models."""

    def model_name(self) -> str:
        return self._model

    def get_response_sender(self) -> ResponseSender:
        if self.sender is None:
            raise TritonModelException("only a request that the model has received has a response sender")
        return self.sender

    def is_cancelled(self) -> bool:
        """True if the client has cancelled the request."""
        return self.sender is not None and self.sender.is_cancelled()

    def exec(self, decoupled: bool = False) -> InferenceResponse | Responses:
        """Call the model and wait for its response. For a decoupled model, return an iterator that waits for each response."""
        if not decoupled:
            return InferenceResponse.of(here.wait_for(self._to_server()))
        replies: SimpleQueue[Outcome] = SimpleQueue()

        def put(outcome: Outcome) -> None:
            if replies.qsize() >= _UNREAD:
                cancel()
                outcome = ResourceExhausted(f"more than {_UNREAD} responses were left unread")
            replies.put(outcome)

        cancel = here.ask(self._to_server(), put, decoupled=True)
        return Responses(replies, cancel)

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse | Responses:
        """Like ``exec``, but awaits the response. For a decoupled model, returns the same iterator as ``exec``."""
        if decoupled:
            return self.exec(decoupled=True)
        loop, replies = asyncio.get_running_loop(), asyncio.Queue[Outcome]()

        def put(outcome: Outcome) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(replies.put_nowait, outcome)

        cancel = here.ask(self._to_server(), put)
        try:
            return InferenceResponse.of(await replies.get())
        finally:
            cancel()

    def _to_server(self) -> InferRequest:
        """Convert the request to the server's form. Raises TritonModelException."""
        if not self._model:
            raise TritonModelException("a request to a model needs 'model_name'")
        parameters = dict(self._parameters)
        if self._correlation_id:
            parameters[_SEQUENCE] = self._correlation_id
            parameters |= {name: True for name, flag in _FLAGS.items() if self._flags & flag}
        for name, value in (("timeout", self._timeout), ("priority", self._priority)):
            if value:
                parameters[name] = value
        return InferRequest(
            model_name=self._model,
            inputs={tensor.name(): tensor.as_numpy() for tensor in self._inputs},
            model_version=str(self._version) if self._version > 0 else "",
            id=self._id,
            outputs=tuple(self._outputs),
            parameters=parameters,
        )


class Responses:
    """An iterator over the responses of a decoupled model. Deleting the iterator cancels the call."""

    def __init__(self, replies: SimpleQueue[Outcome], cancel: Callable[[], None]) -> None:
        self._replies, self._cancel = replies, cancel
        self._ended = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        while not self._ended:
            outcome = self._replies.get()
            self._ended = isinstance(outcome, PenstockError) or outcome.final
            if isinstance(outcome, PenstockError) or outcome.outputs:
                return InferenceResponse.of(outcome)
        raise StopIteration

    def __del__(self) -> None:
        if not self._ended:
            here.host.later(self._cancel)


def _text(value: str | bytes) -> str:
    """Decode ``value`` if it is bytes. Models may pass names that they have read from BYTES tensors."""
    return value.decode() if isinstance(value, bytes) else value
