"""A request for inference and its answer, in the Open Inference Protocol's words and free of any transport."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.clock import Clock
from penstock.errors import DeadlineExceeded
from penstock.tensor import Array

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

    ``outputs`` empty means all. ``model_version`` empty means that the server chooses.
    """

    model_name: str
    inputs: dict[str, Array]
    model_version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Parameters = {}
    deadline: Deadline | None = None


class InferResponse(msgspec.Struct):
    """The answer to one request; ``outputs`` belong to the receiver."""

    model_name: str
    model_version: str
    outputs: dict[str, Array]
    id: str = ""
    parameters: Parameters = {}
