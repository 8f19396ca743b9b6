"""gRPC's standard health check: whether the server as a whole, and the inference service, can be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.errors import InvalidArgument, NotFound, PenstockError
from penstock.online.server.grpc.call import GrpcCall
from penstock.online.server.grpc.control import parse
from penstock.protocol import messages
from penstock.tensor import Buffer

INTERVAL_S = 0.25
"""How often readiness is looked at while somebody watches."""

_Status = messages.HealthCheckResponse


class Health:
    """Answers Check and Watch. Belongs to the event loop."""

    def __init__(self, is_ready: Callable[[], bool], services: frozenset[str]) -> None:
        """``services`` are the names that may be asked for, besides the empty one of the server as a whole."""
        self._is_ready = is_ready
        self._services = services | {""}
        self._watches: set[_Watch] = set()
        self._timer: asyncio.TimerHandle | None = None

    def check(self, call: GrpcCall, data: Buffer, client: str = "") -> None:
        """The unary method."""
        try:
            service = parse(messages.HealthCheckRequest, data).service
            if service not in self._services:
                raise NotFound(f"unknown service '{service}'")
        except PenstockError as error:
            call.finish(error)
            return
        call.send(self.answer(service))
        call.finish()

    def watch(self, call: GrpcCall, client: str = "") -> _Watch:
        """The streaming method."""
        watch = _Watch(call, self)
        self._watches.add(watch)
        call.on_cancel = lambda: self.forget(watch)
        return watch

    def answer(self, service: str) -> bytes:
        """The state of ``service`` now, serialized."""
        if service not in self._services:
            status = _Status.SERVICE_UNKNOWN
        else:
            status = _Status.SERVING if self._is_ready() else _Status.NOT_SERVING
        return bytes(_Status(status=status).SerializeToString())

    def look(self) -> None:
        """Tell those who watch what has changed."""
        for watch in tuple(self._watches):
            watch.look()

    def drain(self, error: PenstockError) -> None:
        """Tell those who watch the last state, and end their calls."""
        self.look()
        for watch in tuple(self._watches):
            watch.end(error)

    def forget(self, watch: _Watch) -> None:
        """It is over."""
        self._watches.discard(watch)
        if not self._watches and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look_regularly(self) -> None:
        """Poll while there are watchers: readiness depends on models that may fail at any time without notice."""
        if self._timer is None and self._watches:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.look()
        self.look_regularly()


class _Watch:
    def __init__(self, call: GrpcCall, health: Health) -> None:
        self._call = call
        self._health = health
        self._service: str | None = None
        self._told = b""

    def message(self, data: Buffer) -> None:
        try:
            if self._service is not None:
                raise InvalidArgument("Watch takes one request")
            self._service = parse(messages.HealthCheckRequest, data).service
        except PenstockError as error:
            self.end(error)
            return
        self._health.look_regularly()
        self.look()

    def half_close(self) -> None:
        if self._service is None:
            self.end(InvalidArgument("Watch takes one request"))

    def look(self) -> None:
        if self._service is not None and (answer := self._health.answer(self._service)) != self._told:
            self._told = answer
            self._call.send(answer)

    def end(self, error: PenstockError) -> None:
        self._health.forget(self)
        self._call.finish(error)
