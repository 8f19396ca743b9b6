"""The gRPC service with the null model, in this process, on grpcio or on our own HTTP/2.

``python -m benchmarks.grpcio_server grpcio|h2`` listens on a free port and prints the line ``ready``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from grpc import aio

from benchmarks import in_process
from benchmarks.in_process import InProcess, NullModel
from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.online.server import status
from penstock.online.server.config import ServerConfig
from penstock.online.server.grpc.call import GrpcMethod
from penstock.online.server.h2.connection import H2Connection, H2Context
from penstock.online.server.network.connections import Connections
from penstock.online.server.network.listener import Endpoint, Listener
from penstock.request import Deadline
from penstock.tensor import Buffer

_HOST = "127.0.0.1"
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioCall:
    """A unary ``GrpcCall`` for a call of grpcio."""

    client = ""

    def __init__(self, context: Any) -> None:
        remaining = context.time_remaining()
        self.deadline = None if remaining is None else Deadline.after(remaining, SystemClock())
        self.metadata: Mapping[str, str | bytes] = dict(context.invocation_metadata() or ())
        self.on_cancel: Callable[[], object] | None = None
        self.ended: asyncio.Future[PenstockError | None] = asyncio.get_running_loop().create_future()
        self.answer = b""

    def reserve(self, size: int) -> None:
        """Do nothing, because grpcio does not limit the memory of calls. So do the methods up to ``spend``."""

    async def hold(self, size: int) -> None: ...

    def park(self) -> None: ...

    def occupy(self, size: int) -> None: ...

    def spend(self, units: int) -> None: ...

    def send(self, *parts: Buffer) -> None:
        """See ``GrpcCall``."""
        self.answer = b"".join(parts)

    def finish(self, error: PenstockError | None = None) -> None:
        """See ``GrpcCall``."""
        if not self.ended.done():
            self.ended.set_result(error)

    def pause(self) -> None:
        """Do nothing, because a unary call has one message."""

    resume = pause


def grpcio_server(methods: Mapping[bytes, GrpcMethod]) -> tuple[Any, int]:
    """A server for the unary methods, and its port. The server is not started yet. Messages are passed as bytes."""
    services: dict[str, dict[str, Any]] = {}
    for path, method in methods.items():
        if method.unary is not None:
            service, name = path.decode()[1:].split("/")
            services.setdefault(service, {})[name] = grpc.unary_unary_rpc_method_handler(_handler(method.unary))
    server = aio.server(handlers=[grpc.method_handlers_generic_handler(*service) for service in services.items()])
    return server, server.add_insecure_port(f"{_HOST}:0")


def _handler(run: Callable[[Any, Buffer], None]) -> Callable[[bytes, Any], Any]:
    async def unary(data: bytes, context: Any) -> bytes:
        call = GrpcioCall(context)
        run(call, data)
        error = await call.ended
        if error is not None:
            await context.abort(_STATUS[status.GRPC[error.code]], str(error))
        return call.answer

    return unary


async def _serve(transport: str) -> None:
    methods = InProcess(NullModel()).service.methods
    if transport == "grpcio":
        server, port = grpcio_server(methods)
        await server.start()
    else:
        config, clock = ServerConfig(), SystemClock()
        connections = Connections(config.max_connections)
        context = H2Context(methods, config, connections, clock)
        endpoint = Endpoint(host=_HOST, http2=lambda: H2Connection(context))
        _, port = await Listener(connections, config, clock).listen(endpoint)
    print(f"ready http={_HOST}:{port} grpc={_HOST}:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    in_process.run(_serve(sys.argv[1]))
