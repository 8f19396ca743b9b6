"""A request for inference and its answer, in the Open Inference Protocol's words and free of any transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.clock import Clock
from penstock.errors import DeadlineExceeded, InvalidArgument, PenstockError
from penstock.tensor import Array

MAX_BYTES_ELEMENTS = 1 << 20
"""Most elements of all BYTES tensors of one request: reading that many takes about a quarter of a second of the server's loop."""

MAX_PARAMETERS = 1024
"""Most parameters of a request or a tensor. Each takes many times its bytes in memory, and time to look at."""

Parameters = dict[str, Any]


class Deadline(msgspec.Struct, frozen=True):
    """A moment on a clock after which an answer is of no use."""

    at: float

    @classmethod
    def after(cls, seconds: float, clock: Clock) -> Deadline:
        return cls(clock.now() + seconds)

    def remaining(self, clock: Clock) -> float:
        """Seconds left; negative once it has passed."""
        return self.at - clock.now()

    def check(self, clock: Clock) -> None:
        """Raise DeadlineExceeded once it has passed."""
        late = -self.remaining(clock)
        if late > 0:
            raise DeadlineExceeded(f"the request's deadline passed {late * 1e3:.1f} ms ago")


class InferRequest(msgspec.Struct):
    """One request. ``inputs`` may be read-only views of a received buffer; nobody writes to them.

    ``outputs`` empty means all. ``model_version`` empty means that the server chooses. ``client`` is the name under which the
    caller is known, empty without authentication.
    """

    model_name: str
    inputs: dict[str, Array]
    model_version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Parameters = {}
    deadline: Deadline | None = None
    """When the answer stops being of use, on the system's monotonic clock."""
    timeout_us: int = 0
    """Longest time in the queue that the caller asks for; 0 is the model's own."""
    priority: int = 0
    """Priority level, 1 the highest; 0 is the model's default."""
    sequence_id: int | str = 0
    """The sequence that the request belongs to; 0 or empty: to none."""
    sequence_start: bool = False
    sequence_end: bool = False
    client: str = ""
    traceparent: str = ""
    """The caller's trace, as the headers ``traceparent`` and ``tracestate`` tell it (W3C Trace Context)."""
    tracestate: str = ""
    trace: object = None
    """The record of this request, if one is kept; telemetry's."""
    step: object = None
    """What the request is in its sequence; the scheduler's."""
    held: Mapping[tuple[str, str], Any] | None = None
    """The models kept loaded for it, by name and version, where it is made on behalf of another; an ensemble's."""
    lease: object = None
    """The shared memory of its inputs and outputs; the server's."""


class InferResponse(msgspec.Struct):
    """The answer to one request; ``outputs`` belong to the receiver.

    A decoupled model gives any number of answers to one request. The last one is ``final``; it has no outputs if the model
    had nothing more to say when it ended.
    """

    model_name: str
    model_version: str
    outputs: dict[str, Array]
    id: str = ""
    parameters: Parameters = {}
    final: bool = True


Outcome = InferResponse | PenstockError
Done = Callable[[Outcome], None]
"""Receives the answer to a request: once, or, from a decoupled model, until an error or a ``final`` response."""


def check_bytes_elements(count: int) -> None:
    """Raise InvalidArgument if a request may not have ``count`` elements of BYTES."""
    if count > MAX_BYTES_ELEMENTS:
        raise InvalidArgument(
            f"{count} BYTES elements are more than the {MAX_BYTES_ELEMENTS} that one request may have",
            "send them in several requests",
        )
