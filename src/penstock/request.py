"""Inference requests and responses as the Open Inference Protocol defines them, independent of the transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.clock import Clock
from penstock.errors import DeadlineExceeded, InvalidArgument, PenstockError
from penstock.tensor import Array

MAX_BYTES_ELEMENTS = 1 << 20
"""Maximum number of BYTES elements in a request. Parsing so many elements blocks the event loop for about 250 ms."""

MAX_PARAMETERS = 1024
"""Maximum number of parameters of a request or a tensor. A parsed parameter takes much more memory than its bytes in the request."""

Parameters = dict[str, Any]


class Deadline(msgspec.Struct, frozen=True):
    """A point in time, on a given clock, after which a response is useless."""

    at: float

    @classmethod
    def after(cls, seconds: float, clock: Clock) -> Deadline:
        return cls(clock.now() + seconds)

    def remaining(self, clock: Clock) -> float:
        """Seconds left; negative after the deadline."""
        return self.at - clock.now()

    def check(self, clock: Clock) -> None:
        """Raise DeadlineExceeded if the deadline has passed."""
        late = -self.remaining(clock)
        if late > 0:
            raise DeadlineExceeded(f"the request's deadline passed {late * 1e3:.1f} ms ago")


class InferRequest(msgspec.Struct):
    """One request. ``inputs`` may be read-only views of a received buffer and must not be written to.

    If ``outputs`` is empty, all outputs are requested. If ``model_version`` is empty, the server chooses a version. ``client`` is
    the client's name in the keys file, or empty without authentication.
    """

    model_name: str
    inputs: dict[str, Array]
    model_version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Parameters = {}
    deadline: Deadline | None = None
    """Time after which the response is useless, on the system's monotonic clock."""
    timeout_us: int = 0
    """Maximum time in the queue, requested by the client; 0 means the model's default."""
    priority: int = 0
    """Priority level; 1 is the highest, and 0 means the model's default."""
    sequence_id: int | str = 0
    """Identifier of the sequence to which the request belongs; 0 or empty without a sequence."""
    sequence_start: bool = False
    sequence_end: bool = False
    client: str = ""
    origin: object = None
    """Key of the flow of requests that gets a fair share of a pipeline's workers: a client, or a connection of unknown clients."""
    traceparent: str = ""
    """The client's trace, from the headers ``traceparent`` and ``tracestate`` (W3C Trace Context)."""
    tracestate: str = ""
    trace: object = None
    """The trace record of this request, if it is traced; used by telemetry."""
    step: object = None
    """The request's role in its sequence; used by the scheduler."""
    held: Mapping[tuple[str, str], Any] | None = None
    """For a request to an ensemble: the models that stay loaded until the request ends, by name and version."""
    lease: object = None
    """The shared memory of the request's inputs and outputs; used by the server."""


class InferResponse(msgspec.Struct):
    """The response to one request. The receiver owns ``outputs``.

    A decoupled model sends any number of responses to one request. The last response is ``final``; it may have no outputs.
    """

    model_name: str
    model_version: str
    outputs: dict[str, Array]
    id: str = ""
    parameters: Parameters = {}
    final: bool = True


Outcome = InferResponse | PenstockError
Done = Callable[[Outcome], None]
"""Receives the responses to a request. Called once, or for a decoupled model until an error or a ``final`` response."""


def check_bytes_elements(count: int) -> None:
    """Raise InvalidArgument if a request with ``count`` BYTES elements exceeds the limit."""
    if count > MAX_BYTES_ELEMENTS:
        raise InvalidArgument(
            f"{count} BYTES elements exceed the limit of {MAX_BYTES_ELEMENTS} per request",
            "send them in several requests",
        )
