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
"""Seconds between two checks of a watched service."""

_Status = messages.HealthCheckResponse


class Health:
    """The methods Check and Watch. Belongs to the event loop."""

    def __init__(self, is_ready: Callable[[], bool], services: frozenset[str]) -> None:
        """``services``: known names, besides the empty name, which means the whole server."""
        self._is_ready = is_ready
        self._services = services | {""}
        self._watches: set[_Watch] = set()

    def check(self, call: GrpcCall, data: Buffer, client: str = "") -> None:
        """The unary method."""
        try:
            service = parse(messages.HealthCheckRequest, data).service
            if service not in self._services:
                raise NotFound(f"unknown service {quoted(service)}")
        except PenstockError as error:
            call.finish(error)
            return
        call.send(self._answer(service))
        call.finish()

    def watch(self, call: GrpcCall, client: str = "") -> _Watch:
        """The streaming method."""
        watch = _Watch(call, self._answer, self._watches.discard)
        self._watches.add(watch)
        return watch

    def announce(self) -> None:
        """Send each watching client the state if it has changed."""
        for watch in tuple(self._watches):
            watch.announce()

    def drain(self, error: PenstockError) -> None:
        """Send each watching client the last state, and end its call with ``error``."""
        for watch in tuple(self._watches):
            watch.announce()
            watch.end(error)

    def _answer(self, service: str) -> bytes:
        if service not in self._services:
            status = _Status.SERVICE_UNKNOWN
        else:
            status = _Status.SERVING if self._is_ready() else _Status.NOT_SERVING
        return bytes(_Status(status=status).SerializeToString())


class _Watch:
    """One call of Watch. It polls, since readiness depends on models, which may fail at any time."""

    def __init__(self, call: GrpcCall, answer: Callable[[str], bytes], ended: Callable[[_Watch], None]) -> None:
        self._call = call
        self._answer = answer
        self._ended = ended
        self._service: str | None = None
        self._sent = b""
        self._timer: asyncio.TimerHandle | None = None
        call.on_cancel = self._stop

    def message(self, data: Buffer) -> None:
        try:
            if self._service is not None:
                raise InvalidArgument("Watch takes one request")
            self._service = parse(messages.HealthCheckRequest, data).service
        except PenstockError as error:
            self.end(error)
        else:
            self._poll()

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

    def _poll(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._poll)
        self.announce()

    def _stop(self) -> None:
        self._ended(self)
        if self._timer is not None:
            self._timer.cancel()
