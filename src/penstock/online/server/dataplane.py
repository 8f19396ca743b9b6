"""The data plane: the path of an inference request through the server, the same for every transport."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from penstock.clock import Clock
from penstock.errors import Code, InvalidArgument, NotFound, PenstockError, Unavailable, Unsupported, quoted
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.handle import Handle
from penstock.online.repository.served import ServedModels
from penstock.online.scheduler.base import Cancellable
from penstock.online.server.access.admission import Admission
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.recording.request_recorder import RequestRecorder
from penstock.online.server.shared_memory.arrivals import Arrivals
from penstock.online.server.shared_memory.lease import Lease
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.request import Deadline, Done, InferRequest
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
EMPTY_FINAL = "triton_enable_empty_final_response"
"""Request parameter. If true, a decoupled request that ends without a further response gets a final response without outputs."""
_MAX_ID_BYTES = 128
_ON_THE_WAY_S = 0.002
"""Time reserved for reading the request and writing the response. It is subtracted from the client's timeout, up to a tenth of the
timeout."""
_REFUSALS = (Code.RESOURCE_EXHAUSTED, Code.PERMISSION_DENIED, Code.UNAUTHENTICATED)


class DataPlane:
    """Answers requests from the models in ``served``. Used only on the event loop.

    A transport looks up a request's model once, with ``acquire``, and passes the handle to the other methods.
    """

    def __init__(  # noqa: PLR0913 - collaborators and keyword-only options
        self,
        served: ServedModels,
        clock: Clock,
        shared_memory: SharedMemory,
        tracer: Tracer,
        admission: Admission | None = None,
        *,
        name: str = "penstock",
        response_limit: ResponseLimit = ResponseLimit(),  # noqa: B008 - immutable
        recorder: RequestRecorder | None = None,
        is_complete: Callable[[], bool] = lambda: True,
    ) -> None:
        """``admission`` is None if every client may do everything. ``name`` is the server's name in its metadata.

        ``recorder`` stores requests that later warm up models. ``is_complete`` is true once every required model is being served.
        """
        self.shared_memory = shared_memory
        """The shared-memory regions to which requests refer."""
        self.tracer = tracer
        """Transports read the client's trace context only while the tracer is enabled."""
        self.response_limit = response_limit
        """Transports refuse to send larger responses."""
        self._served = served
        self._clock = clock
        self._admission = admission
        self._name = name
        self._recorder = recorder
        self._is_complete = is_complete
        self._is_open = False
        self._arrivals = Arrivals()

    def open(self) -> None:
        """End start-up. From now on, the server is ready whenever all required models are served."""
        self._is_open = True

    def close(self) -> None:
        """Begin shutdown: the server is no longer ready."""
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """True between start-up and shutdown."""
        return self._is_open

    @property
    def server_ready(self) -> bool:
        """True if the server reports that it is ready."""
        return self._is_open and self._is_complete()

    def enter(self, client: str) -> None:
        """Count a request of ``client`` that the access guard has not counted. Call this before decoding. Raises ResourceExhausted."""
        if self._admission is not None:
            self._admission.enter(client)

    def acquire(self, name: str, version: str = "", client: str = "") -> Handle:
        """The handle for a request of ``client``. If ``version`` is empty, the model's greatest version is used.

        Call ``infer`` within the same event-loop iteration, because unloading waits only for submitted requests. Raises NotFound,
        Unavailable while the server starts or shuts down, and PermissionDenied if there is no such model and ``client`` may not use
        models of this name.
        """
        try:
            return self._served.find(name, version)
        except NotFound as error:
            if self._admission is not None:
                self._admission.check(client, name)
            if not self._is_open:
                raise Unavailable(
                    f"{error.message}; the server is starting or shutting down", "try again later"
                ) from None
            raise

    def check(self, request: InferRequest, client: str = "") -> None:
        """Check the model name and the inputs' names, datatypes and shapes. Raises the same errors as ``acquire`` and ``infer``."""
        handle = self.acquire(request.model_name, request.model_version, client)
        try:
            if self._admission is not None:
                self._admission.check(client, request.model_name)
            handle.check(request)
        except PenstockError as error:
            self._fail(handle, error, lambda outcome: None)
            raise

    def infer(  # noqa: C901, PLR0912 - each call saved here counts
        self, handle: Handle, request: InferRequest, done: Done, decoupled: bool = False, *, is_inner: bool = False
    ) -> Cancellable | None:
        """Run ``request`` on ``handle``. ``done`` is called on the event loop, possibly before this method returns.

        Returns an object that cancels the request, or None if it has already ended. If ``decoupled`` is true, ``done`` accepts
        several responses. ``is_inner`` means that a model sends the request while it processes an admitted request.

        ``done`` is a callback, because a task and a future per request would take more time than the rest of this path.
        """
        if self.tracer.enabled and not is_inner:
            trace = self.tracer.begin(request, request.traceparent, request.tracestate)
            if trace is not None:
                request.trace = trace
                done = self.tracer.watching(trace, done)
        request.model_version = handle.version
        lease, is_checked = request.lease, False
        if lease is not None and isinstance(lease, Lease):
            done = lease.storing(done)
        try:
            if request.parameters:
                self._read_parameters(request, handle)
            if self._admission is not None and not is_inner:
                done = self._admission.admit(request, done)
            if handle.decoupled and not decoupled:
                raise Unsupported(
                    f"model '{handle.name}' is decoupled: a request has any number of responses",
                    "use a gRPC stream or generate_stream",
                )
            rows, key = handle.check(request)
            if self._recorder is not None:
                done = self._recorder.watch(request, done)
            if (lease is not None or request.sequence_id) and self._arrivals.must_wait(request):
                submit = partial(self._submit, handle, request, rows, key, done)
                return self._arrivals.add(handle, request, submit, lambda error: self._fail(handle, error, done))
            if handle.cache is not None:
                return self._submit(handle, request, rows, key, done)
            is_checked = True
            return handle.scheduler.submit(request, rows, key, done)  # fast path, equivalent to ``_submit``
        except PenstockError as error:
            if is_checked:
                done(error)  # the scheduler has already counted it
            else:
                self._fail(handle, error, done)
        except Exception:  # noqa: BLE001 - a bug must not leave the client unanswered
            _log.exception("request failed")
            self._fail(handle, PenstockError("internal error"), done)
        return None

    def call(
        self, request: InferRequest, done: Done, handle: Handle | None = None, decoupled: bool = False
    ) -> Cancellable | None:
        """Like ``infer``, for a request that a model sends while it processes an admitted request.

        Without ``handle``, the model is looked up by the request's model name and version.
        """
        try:
            found = handle or self._served.find(request.model_name, request.model_version)
        except NotFound as error:
            done(error)
            return None
        return self.infer(found, request, done, decoupled, is_inner=True)

    def _submit(
        self, handle: Handle, request: InferRequest, rows: int, key: Hashable, done: Done
    ) -> Cancellable | None:
        """Pass a checked request to the scheduler or the cache."""
        try:
            if handle.cache is not None:
                return handle.cache.answer(request, done, partial(handle.scheduler.submit, request, rows, key))
            return handle.scheduler.submit(request, rows, key, done)
        except PenstockError as error:
            done(error)  # the scheduler or the cache has already counted it
        except Exception:  # noqa: BLE001 - as above
            _log.exception("request failed")
            self._fail(handle, PenstockError("internal error"), done)
        return None

    def model_ready(self, name: str, version: str = "") -> bool:
        """True if the model can answer now; False for an unknown model."""
        try:
            return self._served.find(name, version).is_healthy
        except PenstockError:
            return False

    def server_metadata(self) -> dict[str, object]:
        """The server's name and version, and the protocol extensions that it supports."""
        shared = ["system_shared_memory"] if self.shared_memory.enabled else []
        return {"name": self._name, "version": __version__, "extensions": [*_EXTENSIONS, *shared]}

    def model_metadata(self, name: str, version: str = "") -> dict[str, object]:
        """The model's metadata: served versions, platform, inputs and outputs. Raises NotFound."""
        handle = self._served.find(name, version)
        return {
            "name": handle.name,
            "versions": self._served.versions(name),
            "platform": handle.platform,
            "inputs": [_describe(spec) for spec in handle.signature.inputs],
            "outputs": [_describe(spec) for spec in handle.signature.outputs],
        }

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """The model's completed configuration. Raises NotFound."""
        return self._served.find(name, version).config

    def _fail(self, handle: Handle, error: PenstockError, done: Done) -> None:
        now_ns = time.monotonic_ns()
        reason = Failure.REJECTED if error.code in _REFUSALS else Failure.OTHER
        handle.statistics.failed(reason, now_ns, now_ns)
        done(error)

    def _read_parameters(self, request: InferRequest, handle: Handle) -> None:
        """Read the parameters for the scheduler. Does not change the mapping of parameters, because requests may share it."""
        parameters = request.parameters
        if EMPTY_FINAL in parameters:
            # Only streams use this parameter, and they have already read it. Some clients send it with every request.
            parameters = request.parameters = {name: parameters[name] for name in parameters if name != EMPTY_FINAL}
        for name in parameters:
            if name.startswith(_RESERVED):
                raise InvalidArgument(f"parameter keys starting with '{_RESERVED}' are reserved, as in {quoted(name)}")
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
        raise InvalidArgument(
            f"parameter {quoted(name)} has invalid value {value!r:.80}. It should be a non-negative integer."
        )
    return value


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"parameter {quoted(name)} has invalid value {value!r:.80}. It should be true or false.")
    return value


def _identity(value: Any) -> int | str:
    """The id of a sequence. A negative integer means the unsigned integer with the same bits, because some clients have only
    signed integers.
    """
    if isinstance(value, str):
        if len(value.encode()) > _MAX_ID_BYTES:
            raise InvalidArgument(f"parameter 'sequence_id' is longer than {_MAX_ID_BYTES} bytes")
        return value
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        raise InvalidArgument(
            f"parameter 'sequence_id' has invalid value {value!r:.80}. It should be a non-negative integer of 64 bits, or a text."
        )
    return value % 2**64


def _describe(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype.value, "shape": spec.shape}
