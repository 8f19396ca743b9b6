"""The interface between gRPC transports and services: calls, receivers of messages, and methods.

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
    """One RPC, as its transport presents it to a method."""

    @property
    def metadata(self) -> Metadata:
        """The call's metadata: names in lower case, values of ``…-bin`` as bytes."""

    @property
    def client(self) -> str:
        """The client's name in the keys file; empty if the method needs no key."""

    @property
    def deadline(self) -> Deadline | None:
        """When the client stops waiting, on the system's monotonic clock; None if the client sets no timeout."""

    on_cancel: Callable[[], object] | None
    """If set, it is called once when the client, the deadline or the connection ends the call before ``finish``."""

    def reserve(self, size: int) -> None:
        """Reserve ``size`` bytes of memory, in addition to the message, until the end of the call. Raises Unavailable."""

    async def hold(self, size: int) -> None:
        """Like ``reserve``, for large amounts: waits until other large requests leave enough room. Raises Cancelled."""

    def park(self) -> None:
        """Record that the request now waits only for its model."""

    def occupy(self, size: int) -> None:
        """Record that decoding a message of ``size`` bytes on another thread begins, or with ``-size`` that it has ended.

        The transport stops reading from a connection while too many of its bytes are being decoded.
        """

    def send(self, *parts: Buffer) -> None:
        """Send one message, given in parts so that large ones need not be joined; the parts must not change afterwards.

        A unary method sends one message and then finishes. After the end of the call, this does nothing.
        """

    def finish(self, error: PenstockError | None = None) -> None:
        """End the call with OK or with ``error``. After the end of the call, this does nothing."""

    def pause(self) -> None:
        """Stop delivering messages of the client, to limit the work and the memory of one stream."""

    def resume(self) -> None:
        """Deliver messages again; the first one may arrive before this method returns."""


class Receiver(Protocol):
    """Receives a stream's messages."""

    def admit(self, data: Buffer | None) -> bool:
        """Decide whether to process a message: ``data``, or None if it is still compressed.

        Returns False to drop the message; the receiver has then already answered it.
        """

    def message(self, data: Buffer) -> None:
        """Receive one message. ``data`` belongs to the receiver and does not change."""

    def half_close(self) -> None:
        """The client has sent its last message. It still waits for responses."""


class GrpcMethod(msgspec.Struct, frozen=True):
    """One method of a service, with exactly one of ``unary`` and ``stream`` set.

    An exception from either is a bug of the method; the transport answers it with INTERNAL.
    """

    unary: Callable[[GrpcCall, Buffer], None] | None = None
    """Answers the call's only message."""
    stream: Callable[[GrpcCall], Receiver | None] | None = None
    """Begins a stream. It may return None if it has already finished the call."""
    admit: Callable[[Metadata], str] | None = None
    """Returns the client's name, given the call's metadata, before other parts of the call are stored. None admits every client.

    Raises PenstockError.
    """
    max_bytes: int | None = None
    """Maximum bytes of a message, both compressed and decompressed; None means the server's limit."""
    units: int = CALL_UNITS
    """Cost of a message and its response on the event loop, in the units of ``Turns``."""
