"""The seam between gRPC transports and services: calls, receivers of messages, and the methods of a table.

Everything runs in callbacks on the event loop. Messages are serialized protobuf, without gRPC's prefix of five bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.request import Deadline
from penstock.tensor import Buffer

CALL_UNITS = 6
"""Cost of a small request for inference."""

Metadata = Mapping[str, str | bytes]


class GrpcCall(Protocol):
    """One RPC, as its transport presents it to a method."""

    @property
    def metadata(self) -> Metadata:
        """The call's metadata: names in lower case, values of ``…-bin`` as bytes."""

    @property
    def client(self) -> str:
        """The client's name in the keys file; empty if the method needs no key."""

    @property
    def deadline(self) -> Deadline | None:
        """When the client stops waiting, on the system's monotonic clock; None if it sets no time-out."""

    on_cancel: Callable[[], object] | None
    """Called once, if set, when the client, the deadline or the connection ends the call before ``finish``."""

    def reserve(self, size: int) -> None:
        """Count ``size`` bytes of memory, in addition to the message, until the end of the call. Raises Unavailable."""

    async def hold(self, size: int) -> None:
        """Like ``reserve``, for memory that is not small: wait until other large requests leave room for it. Raises Cancelled."""

    def park(self) -> None:
        """Note that the request waits for its model, and for nothing else."""

    def occupy(self, size: int) -> None:
        """Note that a message of ``size`` bytes is being decoded on another thread, or with ``-size`` that it no longer is.

        A connection with much to decode is not read.
        """

    def send(self, *parts: Buffer) -> None:
        """Send one message, given in parts so that large ones need not be joined; the parts must not change afterwards.

        A unary method sends one message and then finishes. After the end of the call, this does nothing.
        """

    def finish(self, error: PenstockError | None = None) -> None:
        """End the call with OK or with ``error``. After the end of the call, this does nothing."""

    def pause(self) -> None:
        """Hold back further messages of the client, which bounds the work and the memory of one stream."""

    def resume(self) -> None:
        """Deliver messages again; the first may arrive before this returns."""


class Receiver(Protocol):
    """Receives a stream's messages."""

    def admit(self, data: Buffer | None) -> bool:
        """Whether to go on with a message that has arrived: ``data``, or None if it is still compressed.

        False drops it; the receiver has answered it.
        """

    def message(self, data: Buffer) -> None:
        """Receive one message. ``data`` belongs to the receiver and does not change."""

    def half_close(self) -> None:
        """The client has sent its last message and still waits for answers."""


class GrpcMethod(msgspec.Struct, frozen=True):
    """One method of a service, with exactly one of ``unary`` and ``stream`` set.

    An exception from either is a bug of the method; the transport answers it with INTERNAL.
    """

    unary: Callable[[GrpcCall, Buffer], None] | None = None
    """Answers the call's only message."""
    stream: Callable[[GrpcCall], Receiver | None] | None = None
    """Begins a stream; it may return None once it has finished the call."""
    admit: Callable[[Metadata], str] | None = None
    """Returns the client's name, given the call's metadata, before anything else of the call is kept; None admits every caller.

    Raises PenstockError.
    """
    max_bytes: int | None = None
    """Maximum bytes of a message, inflated or not; None is the server's limit."""
    units: int = CALL_UNITS
    """Cost of a message and its answer on the event loop; see ``Turns``."""
