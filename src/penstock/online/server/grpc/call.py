"""The seam between gRPC transports and services: calls, receivers of messages, and the table of methods.

Callback style, all on the event loop, and free of any library: ``grpc/grpcio.py`` and ``h2/`` both run the table that
``GrpcService.methods`` is. Messages are serialized protobuf without gRPC's five bytes of framing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.request import Deadline
from penstock.tensor import Buffer


class GrpcCall(Protocol):
    """One RPC, as a transport gives it to a method."""

    @property
    def metadata(self) -> Mapping[str, str | bytes]:
        """What came with the call; names in lower case, values of ``…-bin`` as bytes."""

    @property
    def deadline(self) -> Deadline | None:
        """When the client stops waiting; on the system's monotonic clock."""

    on_cancel: Callable[[], object] | None
    """Called once by the transport, if set, when the client, the deadline or the connection ends the call before ``finish``."""

    def send(self, *parts: Buffer) -> None:
        """Send one message, given in parts so that large ones need not be joined; they must not change afterwards.

        A unary method sends exactly one and then finishes. After the end of the call it does nothing.
        """

    def finish(self, error: PenstockError | None = None) -> None:
        """End the call, well or with ``error``. Once it has ended, however, it does nothing."""

    def pause(self) -> None:
        """Hold back further messages of the client, so that work and memory of one stream stay bounded."""

    def resume(self) -> None:
        """Hand on what was held back, and what comes; maybe at once, within this call."""


class Receiver(Protocol):
    """Receives a stream's messages."""

    def message(self, data: Buffer) -> None:
        """One message. ``data`` belongs to the receiver and does not change."""

    def half_close(self) -> None:
        """The client has sent its last message, and still waits for answers."""


class ClosedReceiver:
    """Receives the messages of a stream that was refused, and ignores them."""

    def message(self, data: Buffer) -> None:
        """Ignored."""

    def half_close(self) -> None:
        """Ignored."""


class GrpcMethod(msgspec.Struct, frozen=True):
    """One method of a service: ``unary`` takes the call and its only message; ``stream`` takes the call when it begins.

    Exactly one of the two is set. What either of them raises is a bug; the transport answers it with INTERNAL.
    """

    path: bytes
    """As in HTTP/2's ``:path``, e.g. ``/inference.GRPCInferenceService/ModelInfer``."""
    unary: Callable[[GrpcCall, Buffer], None] | None = None
    stream: Callable[[GrpcCall], Receiver] | None = None


class Unary(Protocol):
    """Answers the only message of a call of ``client``."""

    def __call__(self, call: GrpcCall, data: Buffer, client: str = "") -> None: ...


class Streaming(Protocol):
    """Begins a stream of ``client``; the receiver gets its messages."""

    def __call__(self, call: GrpcCall, client: str = "") -> Receiver: ...
