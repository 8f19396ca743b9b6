"""gRPC's standard health check, for the whole server and for the inference service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.errors import InvalidArgument, NotFound, PenstockError, quoted
from penstock.online.server.grpc.call import GrpcCall
from penstock.online.server.grpc.control import parse
from penstock.protocol import messages
from penstock.tensor import Buffer

INTERVAL_S = 0.25
"""Seconds between two checks of the server's state for watching clients."""

_Status = messages.HealthCheckResponse


class Health:
    """The methods Check and Watch. Used only on the event loop."""

    def __init__(self, is_ready: Callable[[], bool], services: frozenset[str]) -> None:
        """``services`` are the known service names. The empty name is also known and means the whole server."""
        self._is_ready = is_ready
        self._services = services | {""}
        self._watches: set[_Watch] = set()
        self._announced = False
        self._timer: asyncio.TimerHandle | None = None

    def check(self, call: GrpcCall, data: Buffer) -> None:
        """The unary method ``Check``."""
        try:
            service = parse(messages.HealthCheckRequest, data).service
            if service not in self._services:
                raise NotFound(f"unknown service {quoted(service)}")
        except PenstockError as error:
            call.finish(error)
            return
        call.send(self._answer(service))
        call.finish()

    def watch(self, call: GrpcCall) -> _Watch:
        """The streaming method ``Watch``."""
        watch = _Watch(call, self._answer, self._watches.discard)
        self._watches.add(watch)
        if self._timer is None:
            self._poll()
        return watch

    def announce(self) -> None:
        """If the state has changed, send it to each watching client."""
        self._announced = self._is_ready()
        for watch in tuple(self._watches):
            watch.announce()

    def drain(self, error: PenstockError) -> None:
        """Send each watching client the last state, and end its call with ``error``."""
        for watch in tuple(self._watches):
            watch.announce()
            watch.end(error)

    def _poll(self) -> None:
        """Poll readiness on behalf of all watching clients, because models may fail at any time."""
        self._timer = None
        if self._watches:
            if self._is_ready() != self._announced:
                self.announce()
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._poll)

    def _answer(self, service: str) -> bytes:
        if service not in self._services:
            status = _Status.SERVICE_UNKNOWN
        else:
            status = _Status.SERVING if self._is_ready() else _Status.NOT_SERVING
        return bytes(_Status(status=status).SerializeToString())


class _Watch:
    """One call of Watch."""

    def __init__(self, call: GrpcCall, answer: Callable[[str], bytes], ended: Callable[[_Watch], None]) -> None:
        self._call = call
        self._answer = answer
        self._ended = ended
        self._service: str | None = None
        self._sent = b""
        call.on_cancel = self._stop

    def admit(self, data: Buffer | None) -> bool:
        return True

    def message(self, data: Buffer) -> None:
        try:
            if self._service is not None:
                raise InvalidArgument("Watch takes one request")
            self._service = parse(messages.HealthCheckRequest, data).service
        except PenstockError as error:
            self.end(error)
        else:
            self.announce()

    def half_close(self) -> None:
        if self._service is None:
            self.end(InvalidArgument("Watch takes one request"))

    def announce(self) -> None:
        if self._service is not None and (answer := self._answer(self._service)) != self._sent:
            self._sent = answer
            self._call.send(answer)

    def end(self, error: PenstockError) -> None:
        self._stop()
        self._call.finish(error)

    def _stop(self) -> None:
        self._ended(self)
