"""gRPC on the ``grpcio`` package: the reference transport, complete and slower than our own."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc import aio

from penstock.clock import Clock
from penstock.errors import InvalidConfig, PenstockError, ResourceExhausted
from penstock.online.server import status
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.config import ServerConfig
from penstock.online.server.grpc.call import GrpcMethod, Receiver
from penstock.online.server.grpc.service import GrpcService
from penstock.request import Deadline
from penstock.tensor import Buffer

_log = logging.getLogger(__name__)

_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_KEEPALIVE_MS = 60_000
_KEEPALIVE_TIMEOUT_MS = 20_000
_LEAST_BETWEEN_PINGS_MS = 10_000


class GrpcioServer:
    """Listens and runs the methods of a service. Belongs to the event loop; ``start`` begins listening."""

    def __init__(
        self, service: GrpcService, config: ServerConfig, port: int, clock: Clock, budget: ByteBudget | None = None
    ) -> None:
        """``budget``: None is no limit. What is only coming in is not counted: grpcio does not show it."""
        self._service = service
        self._config = config
        self._port = port
        self._clock = clock
        self._budget = budget or ByteBudget(0)
        self._server: Any = None

    async def start(self) -> tuple[str, int]:
        """Listen; returns the address bound. Raises OSError, InvalidConfig."""
        config = self._config
        self._server = aio.server(handlers=self._handlers(self._service.methods), options=self._options())
        host = config.host_of("grpc") or "0.0.0.0"  # noqa: S104 - what an empty host stands for
        address = f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
        try:
            if config.tls_certificate:
                port = self._server.add_secure_port(address, _credentials(config))
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(errno.EADDRINUSE, f"cannot bind: {error}") from None
        await self._server.start()
        return host, port

    def announce_end(self) -> None:
        """Tell those who watch that readiness has changed."""
        self._service.announce_health()

    async def drain(self, grace_s: float, timeout_s: float) -> None:
        """After ``grace_s`` take no more calls, and end streams once they are answered; after ``timeout_s`` cut off the rest."""
        self.announce_end()
        await asyncio.sleep(grace_s)
        self._service.drain()
        await self._server.stop(timeout_s)

    async def stop(self) -> None:
        """Cut off everything."""
        if self._server is not None:
            await self._server.stop(None)

    def _options(self) -> list[tuple[str, int]]:
        config = self._config
        return [
            ("grpc.max_receive_message_length", config.max_request_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", config.max_header_bytes),
            ("grpc.absolute_max_metadata_size", config.max_header_bytes),
            ("grpc.max_concurrent_streams", config.max_streams),
            ("grpc.max_connection_idle_ms", max(1, int(config.idle_timeout_s * 1000))),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_BETWEEN_PINGS_MS),
            ("grpc.so_reuseport", 0),
        ]

    def _handlers(self, methods: Mapping[bytes, GrpcMethod]) -> list[Any]:
        """One generic handler a service; messages stay bytes."""
        services: dict[str, dict[str, Any]] = {}
        for path, method in methods.items():
            service, name = path.decode()[1:].split("/")
            services.setdefault(service, {})[name] = self._handler(method)
        return [grpc.method_handlers_generic_handler(*service) for service in services.items()]

    def _handler(self, method: GrpcMethod) -> Any:
        if method.unary is not None:
            run_unary = method.unary

            async def unary(data: bytes, context: Any) -> bytes:
                call = self._call(context)
                size, budget = len(data), self._budget
                if not budget.take(size):
                    await call.refuse(budget.refusal())
                try:
                    await call.run(lambda: run_unary(call, data), call.one_message)
                finally:
                    budget.give(size)
                return call.unsent.popleft() if call.unsent else b""

            return grpc.unary_unary_rpc_method_handler(unary)
        assert method.stream is not None
        run_stream = method.stream

        async def stream(_: Any, context: Any) -> None:
            call = self._call(context)
            await call.run(lambda: call.receive(run_stream(call)), call.write)

        return grpc.stream_stream_rpc_method_handler(stream)

    def _call(self, context: Any) -> GrpcioCall:
        remaining = context.time_remaining()
        deadline = None if remaining is None else Deadline.after(remaining, self._clock)
        return GrpcioCall(context, deadline, self._config.max_unsent_bytes)


class GrpcioCall:
    """A ``GrpcCall`` on a context of grpcio."""

    def __init__(self, context: Any, deadline: Deadline | None, max_unsent_bytes: int) -> None:
        self.deadline = deadline
        self.on_cancel: Callable[[], object] | None = None
        self.unsent: deque[bytes] = deque()
        self._context = context
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent_bytes = 0
        self._changed = asyncio.Event()
        self._may_receive = asyncio.Event()
        self._may_receive.set()
        self._has_ended = False
        self._error: PenstockError | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def metadata(self) -> Mapping[str, str | bytes]:
        """See ``GrpcCall``; values of one name are joined by commas."""
        joined: dict[str, str | bytes] = {}
        for name, value in self._context.invocation_metadata() or ():
            before = joined.get(name)
            joined[name] = f"{before},{value}" if isinstance(before, str) and isinstance(value, str) else value
        return joined

    def send(self, *parts: Buffer) -> None:
        """See ``GrpcCall``."""
        if self._has_ended:
            return
        message = b"".join(parts)
        # One message alone may be of any size: it is in memory anyhow.
        if self.unsent and self._unsent_bytes + len(message) > self._max_unsent_bytes:
            self.unsent.clear()
            self.finish(ResourceExhausted("the client does not read its answers", "read them, or ask for less"))
            # grpcio tells a status only after the message that it has begun to send: the client gets it when it reads on.
            self._cancel()
            return
        self._unsent_bytes += len(message)
        self.unsent.append(message)
        self._changed.set()

    def finish(self, error: PenstockError | None = None) -> None:
        """See ``GrpcCall``."""
        if not self._has_ended:
            self._has_ended = True
            self._error = error
            self._changed.set()

    def pause(self) -> None:
        """See ``GrpcCall``."""
        self._may_receive.clear()

    def resume(self) -> None:
        """See ``GrpcCall``."""
        self._may_receive.set()

    async def run(self, start: Callable[[], None], answer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """``start`` the method and ``answer`` until it has ended; end the call with its status."""
        try:
            self._guarded(start)
            await answer()
        except asyncio.CancelledError:
            # By client, deadline or connection.
            self._has_ended = True
            self._cancel()
            raise
        finally:
            if self._reader is not None:
                self._reader.cancel()
        if self._error is not None:
            await self._abort(self._error)

    async def refuse(self, error: PenstockError) -> NoReturn:
        """End the call with ``error`` instead of running a method."""
        await self._abort(error)
        raise AssertionError("an aborted call goes on")

    def receive(self, receiver: Receiver) -> None:
        """Hand on what the client sends, from now on."""
        self._reader = asyncio.get_running_loop().create_task(self._receive(receiver))

    async def one_message(self) -> None:
        """Return when a unary method has ended."""
        while not self._has_ended:
            self._changed.clear()
            await self._changed.wait()

    async def write(self) -> None:
        """Send messages until the method has ended and nothing is left."""
        while True:
            while self.unsent:
                message = self.unsent[0]
                await self._context.write(message)
                if self.unsent:
                    self.unsent.popleft()
                    self._unsent_bytes -= len(message)
            if self._has_ended:
                return
            self._changed.clear()
            await self._changed.wait()

    async def _receive(self, receiver: Receiver) -> None:
        while not self._has_ended:
            data = await self._context.read()
            await self._may_receive.wait()
            if data is aio.EOF:
                self._guarded(receiver.half_close)
                return
            self._guarded(lambda data=data: receiver.message(data))  # type: ignore[misc]

    def _guarded(self, function: Callable[[], None]) -> None:
        """``function()``; what it raises is a bug of ours, and must not leave the client without an answer."""
        try:
            function()
        except Exception:  # noqa: BLE001
            _log.exception("a call failed")
            self.finish(PenstockError("internal error"))

    def _cancel(self) -> None:
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            self._guarded(on_cancel)  # type: ignore[arg-type]

    async def _abort(self, error: PenstockError) -> None:
        trailers = ()
        if error.retry_after_s is not None:
            trailers = (("grpc-retry-pushback-ms", str(math.ceil(error.retry_after_s * 1000))),)  # type: ignore[assignment]
        await self._context.abort(_STATUS[status.GRPC[error.code]], str(error), trailers)


def _credentials(config: ServerConfig) -> Any:
    certificate = _read(config.tls_certificate)
    key = _read(config.tls_key) if config.tls_key else certificate
    authorities = _read(config.tls_client_ca) if config.tls_client_ca else None
    return grpc.ssl_server_credentials([(key, certificate)], authorities, authorities is not None)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfig(f"cannot read '{path}': {error.strerror}") from None
