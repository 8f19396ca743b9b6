"""A gRPC call without a transport: tests see what was sent, and decide when the client goes away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import PenstockError
from penstock.online.server.grpc.call import GrpcMethod
from penstock.protocol import messages
from penstock.request import Deadline
from penstock.tensor import Buffer


class FakeCall:
    """``sent`` holds whole messages; ``ended`` whether the call has its status, and ``error`` which, None if it is well."""

    carrier: object = None

    def __init__(self, metadata: dict[str, str | bytes] | None = None, deadline: Deadline | None = None) -> None:
        self.metadata: dict[str, str | bytes] = metadata or {}
        self.deadline = deadline
        self.client = ""
        self.reserved = 0
        self.on_cancel: Callable[[], object] | None = None
        self.sent: list[bytes] = []
        self.ended = False
        self.error: PenstockError | None = None
        self.is_paused = self.is_parked = False
        self.occupied = self.spent = 0
        self.resumed: Callable[[], None] = lambda: None

    def reserve(self, size: int) -> None:
        self.reserved += size

    async def hold(self, size: int) -> None:
        self.reserve(size)

    def park(self) -> None:
        self.is_parked = True

    def occupy(self, size: int) -> None:
        self.occupied += size

    def spend(self, units: int) -> None:
        self.spent += units

    def send(self, *parts: Buffer) -> None:
        if not self.ended:
            self.sent.append(b"".join(parts))

    def finish(self, error: PenstockError | None = None) -> None:
        if not self.ended:
            self.ended, self.error = True, error

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self.resumed()

    def cancel(self) -> None:
        """As the transport does when the client goes away."""
        if not self.ended and self.on_cancel is not None:
            self.ended = True
            self.on_cancel()

    def answers(self) -> list[Any]:
        """What was sent on an inference stream."""
        return [messages.ModelStreamInferResponse.FromString(data) for data in self.sent]


def invoke(method: GrpcMethod, call: FakeCall, *data: Buffer) -> Any:
    """What ``method`` returns, called as a transport does: once it has admitted the client."""
    if method.admit is not None:
        try:
            call.client = method.admit(call.metadata)
        except PenstockError as error:
            call.finish(error)
            return None
    run: Any = method.unary or method.stream
    return run(call, *data)
