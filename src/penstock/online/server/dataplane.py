"""The data plane: what a request goes through, whatever transport it came by."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penstock.clock import Clock
from penstock.errors import Code, InvalidArgument, NotFound, PenstockError, Unavailable, Unsupported
from penstock.online.repository.handle import Handle
from penstock.online.repository.served import ServedModels
from penstock.online.scheduler.base import Cancellable
from penstock.online.server.access.admission import Admission
from penstock.online.server.classification import Labels, classify_outputs
from penstock.online.server.recording.request_recorder import RequestRecorder
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.protocol.messages import Message
from penstock.request import Deadline, Done, InferRequest, InferResponse
from penstock.telemetry.statistics import Failure
from penstock.telemetry.tracing import Tracer
from penstock.tensor import TensorSpec
from penstock.version import __version__

_log = logging.getLogger(__name__)

_EXTENSIONS = [
    "binary_tensor_data",
    "classification",
    "sequence",
    "schedule_policy",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
    "trace",
    "logging",
]
_RESERVED = "triton_"
_MAX_ID_BYTES = 128
_ON_THE_WAY_S = 0.002
"""Of a caller's time-out, what may pass before its request is read and after its answer is written; a tenth of it at most."""
_REFUSALS = (Code.RESOURCE_EXHAUSTED, Code.PERMISSION_DENIED, Code.UNAUTHENTICATED)


class DataPlane:
    """Answers requests from the models in ``served``. Belongs to the event loop."""

    def __init__(
        self,
        served: ServedModels,
        clock: Clock,
        shared_memory: SharedMemory,
        tracer: Tracer,
        admission: Admission | None = None,
    ) -> None:
        """``admission`` is None if everybody may do everything."""
        self._served = served
        self._clock = clock
        self._admission = admission
        self.shared_memory = shared_memory
        """What transports resolve tensors in shared memory with."""
        self.tracer = tracer
        """Transports look for the caller's trace only where it is enabled."""
        self.ready = False
        """Whether start-up is over and the server is not shutting down; set by the composition root."""
        self.name = "penstock"
        """What the server calls itself; may be set by the composition root."""
        self.is_complete: Callable[[], bool] = lambda: True
        """Whether all models are served that have to be for the server to count as ready; may be set by the composition root."""
        self.recorder: RequestRecorder | None = None
        """Keeps requests to warm models up with; may be set by the composition root."""

    def infer(self, request: InferRequest, done: Done, decoupled: bool = False) -> Cancellable | None:
        """Have ``request`` answered; ``done`` is called on the event loop as ``Done`` says, perhaps before this returns.

        A callback and no future: a task and a future per request would cost more than all the rest of this path.
        What is returned can be cancelled; it is None if the request has ended already. ``decoupled`` tells that ``done``
        takes more than one answer.
        """
        if self.tracer.enabled:
            done = self._record(request, done)
        try:
            handle = self._served.find(request.model_name, request.model_version)
        except NotFound as error:
            done(self._unknown(request, error))
            return None
        return self._ask(handle, request, done, decoupled, self._admission)

    def call(
        self, request: InferRequest, done: Done, handle: Handle | None = None, decoupled: bool = False
    ) -> Cancellable | None:
        """As ``infer`` for a request that a model makes in answering another, which has been admitted; ``handle`` is the model's, if
        it is held already."""
        try:
            found = handle or self._served.find(request.model_name, request.model_version)
        except NotFound as error:
            done(error)
            return None
        return self._ask(found, request, done, decoupled, None)

    def _ask(
        self, handle: Handle, request: InferRequest, done: Done, decoupled: bool, admission: Admission | None
    ) -> Cancellable | None:
        request.model_version = handle.version
        try:
            if request.parameters:
                self._read_parameters(request, handle)
            if admission is not None:
                done = admission.admit(request, done)
            if handle.decoupled and not decoupled:
                raise Unsupported(
                    f"model '{handle.name}' is decoupled: it answers a request any number of times",
                    "ask over a gRPC stream, or with generate_stream",
                )
            rows, key = handle.check(request)
            if self.recorder is not None:
                done = self.recorder.watch(request, done)
        except PenstockError as error:
            self._fail(handle, error, done)
            return None
        except Exception:  # noqa: BLE001 - a bug of ours must not leave the client without an answer
            _log.exception("request failed")
            self._fail(handle, PenstockError("internal error"), done)
            return None
        try:
            if handle.cache is not None:
                return handle.cache.answer(request, done, partial(handle.scheduler.submit, request, rows, key))
            return handle.scheduler.submit(request, rows, key, done)
        except PenstockError as error:
            done(error)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("request failed")
            self._fail(handle, PenstockError("internal error"), done)
        return None

    def is_decoupled(self, name: str, version: str = "") -> bool:
        """Whether the model gives any number of answers to a request. Raises NotFound."""
        return self._served.find(name, version).decoupled

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether the model can be asked now; of an unknown model False."""
        try:
            return self._served.find(name, version).is_healthy
        except PenstockError:
            return False

    @property
    def server_ready(self) -> bool:
        """Whether the server counts as ready."""
        return self.ready and self.is_complete()

    def server_metadata(self) -> dict[str, object]:
        """Name, version and the extensions of the protocol that are spoken."""
        shared = ["system_shared_memory", "cuda_shared_memory"] if self.shared_memory.enabled else []
        return {"name": self.name, "version": __version__, "extensions": [*_EXTENSIONS, *shared]}

    def model_metadata(self, name: str, version: str = "") -> dict[str, object]:
        """Versions served, platform, inputs and outputs. Raises NotFound."""
        handle = self._served.find(name, version)
        return {
            "name": handle.name,
            "versions": self._served.versions(name),
            "platform": handle.platform,
            "inputs": [_describe(spec) for spec in handle.signature.inputs],
            "outputs": [_describe(spec) for spec in handle.signature.outputs],
        }

    def model_config(self, name: str, version: str = "") -> Message:
        """The effective configuration, a ``ModelConfig`` message with its defaults filled in. Raises NotFound."""
        return self._served.find(name, version).config

    def labels(self, name: str, version: str = "") -> Labels:
        """What the classes of the model's outputs are called. Raises NotFound."""
        return self._served.find(name, version).labels

    def classify(self, response: InferResponse, counts: Mapping[str, int]) -> None:
        """Replace the outputs named in ``counts`` by that many of their greatest values. Raises NotFound, InvalidArgument."""
        handle = self._served.find(response.model_name, response.model_version)
        classify_outputs(response, counts, handle.signature.batchable, handle.labels)

    def _unknown(self, request: InferRequest, error: NotFound) -> PenstockError:
        """What is said of a model that is not here: to clients without the right to it the same as if it were."""
        if self._admission is not None:
            try:
                self._admission.check(request)
            except PenstockError as refusal:
                return refusal
        if not self.ready:
            return Unavailable(f"{error.message}; the server is starting or ending", "try again later")
        return error

    def _record(self, request: InferRequest, done: Done) -> Done:
        trace = self.tracer.begin(request, request.traceparent, request.tracestate)
        if trace is None:
            return done
        request.trace = trace
        return self.tracer.watching(trace, done)

    def _fail(self, handle: Handle, error: PenstockError, done: Done) -> None:
        now_ns = time.monotonic_ns()
        reason = Failure.REJECTED if error.code in _REFUSALS else Failure.OTHER
        handle.statistics.failed(reason, now_ns, now_ns)
        done(error)

    def _read_parameters(self, request: InferRequest, handle: Handle) -> None:
        """Take out those parameters that are the scheduler's. They may be shared between requests, so they are not changed."""
        parameters = request.parameters
        for name in parameters:
            if name.startswith(_RESERVED):
                raise InvalidArgument(f"parameter keys starting with '{_RESERVED}' are reserved, as in '{name}'")
        if "sequence_id" in parameters:
            request.sequence_id = _identity(parameters["sequence_id"])
            request.sequence_start = _flag(parameters, "sequence_start")
            request.sequence_end = _flag(parameters, "sequence_end")
        if "priority" in parameters:
            request.priority = _count(parameters, "priority")
        if "timeout" in parameters:
            request.timeout_us = _count(parameters, "timeout")
            if request.timeout_us and not handle.overrides_timeout:
                timeout_s = request.timeout_us * 1e-6
                deadline = Deadline.after(timeout_s - min(_ON_THE_WAY_S, timeout_s / 10), self._clock)
                if request.deadline is None or deadline.at < request.deadline.at:
                    request.deadline = deadline


def _count(parameters: dict[str, Any], name: str) -> int:
    value = parameters[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise InvalidArgument(f"parameter '{name}' has invalid value {value!r}. It should be a non-negative integer.")
    return value


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"parameter '{name}' has invalid value {value!r}. It should be true or false.")
    return value


def _identity(value: Any) -> int | str:
    """The id of a sequence; a negative integer is the unsigned one with its bits, for some clients have no other way to say it."""
    if isinstance(value, str):
        if len(value.encode()) > _MAX_ID_BYTES:
            raise InvalidArgument(f"parameter 'sequence_id' is longer than {_MAX_ID_BYTES} bytes")
        return value
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        raise InvalidArgument(
            f"parameter 'sequence_id' has invalid value {value!r}. It should be a non-negative integer of 64 bits, or a text."
        )
    return value % 2**64


def _describe(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype.value, "shape": spec.shape}
