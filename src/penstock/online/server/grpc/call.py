"""The interface between gRPC transports and services: calls, receivers and methods.

All methods run in callbacks on the event loop. Messages are serialized protobuf, without gRPC's five-byte prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.request import Deadline
from penstock.tensor import Buffer

CALL_UNITS = 6
"""Cost of a small inference request, in the units of ``Turns``."""

Metadata = Mapping[str, str | bytes]


class GrpcCall(Protocol):
    """One RPC, which the transport passes to a method."""

    @property
    def metadata(self) -> Metadata:
        """The call's metadata. Names are in lower case. Values of ``…-bin`` are bytes."""

    @property
    def client(self) -> str:
        """The client's name in the keys file; empty if the method does not require a key."""

    @property
    def carrier(self) -> object:
        """The connection."""

    @property
    def deadline(self) -> Deadline | None:
        """The time when the client stops waiting, on the system's monotonic clock; None if the client sets no timeout."""

    on_cancel: Callable[[], object] | None
    """Called at most once, if the client, the deadline or a lost connection ends the call before ``finish``."""

    def reserve(self, size: int) -> None:
        """Reserve ``size`` bytes of memory until the end of the call. The message itself is already counted. Raises Unavailable."""

    async def hold(self, size: int) -> None:
        """Like ``reserve``, for large amounts. Waits until other large requests leave enough room. Raises Cancelled."""

    def park(self) -> None:
        """Record that the request now waits only for its model."""

    def occupy(self, size: int) -> None:
        """Record that a message of ``size`` bytes is being decoded on another thread. Call this with ``-size`` afterwards.

        The transport stops reading from a connection while too many bytes of its messages are being decoded.
        """

    def spend(self, units: int) -> None:
        """Charge ``units`` of work on the event loop, in addition to ``GrpcMethod.units``. Only a method that was just called may call
        this.
        """

    def send(self, *parts: Buffer) -> None:
        """Send one message. It consists of parts, so that large parts need not be joined. The parts must not change afterwards.

        A unary method sends one message and then calls ``finish``. After the end of the call, ``send`` does nothing.
        """

    def finish(self, error: PenstockError | None = None) -> None:
        """End the call with OK or with ``error``. After the end of the call, ``finish`` does nothing."""

    def pause(self) -> None:
        """Stop delivering the client's messages, to limit the work and the memory of one stream."""

    def resume(self) -> None:
        """Deliver messages again. The first message may arrive before this method returns."""


class Receiver(Protocol):
    """Receives a stream's messages."""

    def admit(self, data: Buffer | None) -> bool:
        """Return True to process the message ``data``. ``data`` is None if the message is still compressed.

        Return False to drop the message. The receiver has then already answered it.
        """

    def message(self, data: Buffer) -> None:
        """Receive one message. ``data`` belongs to the receiver and does not change."""

    def half_close(self) -> None:
        """Called when the client has sent its last message. The client still waits for responses."""


class GrpcMethod(msgspec.Struct, frozen=True):
    """One method of a service. Exactly one of ``unary`` and ``stream`` is set.

    An exception from either function is a bug. The transport then answers the call with INTERNAL.
    """

    unary: Callable[[GrpcCall, Buffer], None] | None = None
    """Answers the call's only message."""
    stream: Callable[[GrpcCall], Receiver | None] | None = None
    """Begins a stream. Returns None if the call is already finished."""
    admit: Callable[[Metadata], str] | None = None
    """Checks the client before other parts of the call are stored. Takes the metadata, and returns the client's name. None admits
    all clients.

    Raises PenstockError.
    """
    max_bytes: int | None = None
    """Maximum bytes of a message, both compressed and decompressed; None means the server's limit."""
    units: int = CALL_UNITS
    """Cost of a message and its response on the event loop, in the units of ``Turns``. ``GrpcCall.spend`` adds to it."""
