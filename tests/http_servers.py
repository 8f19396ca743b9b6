"""Our own HTTP server in a thread, over fake models and with a clock that tests move, and a client of plain sockets."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

import uvloop

from handles import make_handle
from penstock.clock import ManualClock, SystemClock
from penstock.online.repository.handle import Handle
from penstock.online.repository.served import ServedModels
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.access.table import RULES, AccessRule, AccessTable
from penstock.online.server.access.web import WebAccess
from penstock.online.server.config import ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http.connection import Http1Connection
from penstock.online.server.http.context import HttpContext
from penstock.online.server.http.resources import make_resources
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.network.connections import Connections
from penstock.online.server.network.listener import Endpoint, Listener
from penstock.online.server.network.unread import UnreadTotal
from penstock.online.server.processes.group import ProcessGroup
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.telemetry.logging import LogSettings
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer
from penstock.tensor import Array
from penstock.testing import DOUBLER, FakeModel, FakeStreamingModel, double

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
PATIENCE_S = 20


class CountingModels(ServedModels):
    """Counts the look-ups."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def find(self, name: str, version: str = "") -> Handle:
        self.looks += 1
        return super().find(name, version)


class GatedServer:
    """Serves ``double`` as model ``m``. While ``gate`` is clear the model holds every batch; ``entered`` counts them."""

    def __init__(
        self,
        loop: str = "asyncio",
        also: Mapping[str, FakeModel | FakeStreamingModel] | None = None,
        access: Access | None = None,
        max_bytes: int = 0,
        tls: ssl.SSLContext | None = None,
        rules: Iterable[AccessRule] = RULES,
        web: WebAccess | None = None,
        **config: Any,
    ) -> None:
        """``also``: more models by name; ``max_bytes``: of all requests in hand together, 0 is no bound; ``web``: who may ask, by
        default everyone.
        """
        self._web = web
        self._also = also or {}
        self._access, self._tls, self._rules = access, tls, rules
        self.budget = ByteBudget(max_bytes)
        self.clock = ManualClock()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.model = FakeModel(DOUBLER, self._forward)
        self._config = ServerConfig(http_port=0, **config)
        self._loop_name = loop
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._clients = ExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(PATIENCE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self.gate.set()
        self._clients.close()
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def connect(self) -> Client:
        return self._clients.enter_context(Client(self.address))

    def call(self, function: Callable[[], Any]) -> Any:
        """``function()`` on the server's event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    @contextmanager
    def ended(self, model: FakeStreamingModel) -> Iterator[None]:
        """Afterwards wait until every stream of ``model`` has ended."""
        yield
        self.until(lambda: bool(model.calls) and model.closed == len(model.calls))

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds on the server's event loop."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.call(condition):
            assert time.monotonic() < deadline

    def pass_time(self, seconds: float) -> None:
        """Look at the connections, let ``seconds`` pass, look again."""
        self.call(self.listener.sweep)
        self.clock.advance(seconds)
        self.call(self.listener.sweep)

    def _forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.entered.release()
        assert self.gate.wait(PATIENCE_S)
        return double(inputs)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=LOOPS[self._loop_name]) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        repository = CountingModels()
        handle = make_handle(self.model, max_queue=self._config.max_queue)
        handle.start()
        repository.add(handle)
        for name, model in self._also.items():
            other = make_handle(model, name)
            other.start()
            repository.add(other)
        self.repository = repository
        shared_memory, tracer = SharedMemory(enabled=True), Tracer(TraceSettings())
        limit = ResponseLimit(self._config.max_response_bytes)
        self.dataplane = DataPlane(repository, SystemClock(), shared_memory, tracer, response_limit=limit)
        self.dataplane.open()
        control = ControlPlane(
            repository, shared_memory, tracer, LogSettings(), ProcessGroup(), MetricsPage(repository.statistics)
        )
        self.connections = Connections(self._config.max_connections)
        self.listener = Listener(self.connections, self._config, self.clock)
        self.control = control
        access = self._access or Access(None, self.clock)
        resources = make_resources(self.dataplane, control, access, self._config)
        table = AccessTable(access, self._config.http_restricted_api, rules=self._rules)
        self.unread = UnreadTotal(self._config.max_unread_bytes, self.clock)
        self.context = HttpContext(
            resources, table, self._config, self.connections, self.budget, self._web, self.unread
        )
        http = functools.partial(Http1Connection, self.context)
        self.address = await self.listener.listen(
            Endpoint(host=self._config.host, port=self._config.http_port, http=http, tls=self._tls)
        )
        self._started.set()
        await self._stop.wait()
        self.listener.stop()
        await repository.unload_all()


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])

    @property
    def data(self) -> list[float]:
        return list(json.loads(self.body)["outputs"][0]["data"])


class Client:
    """One connection; sends whatever it is told to."""

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(address, PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = _encrypted(self.socket, address[0], tls)
        self._reader = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Go away."""
        self._reader.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_final(self) -> Answer:
        """The next answer that is not an interim one."""
        while (answer := self.read()).status == 100:
            pass
        return answer

    def read(self) -> Answer:
        """The next answer; raises EOFError if the connection is closed instead."""
        first = self._reader.readline()
        if not first:
            raise EOFError
        headers = {}
        while (line := self._reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(iter(self.read_chunk, b""))
        elif "content-length" in headers:
            body = self._reader.read(int(headers["content-length"]))
        else:
            body = self._reader.read() if headers.get("connection") == "close" else b""
        return Answer(int(first.split()[1]), headers, body)

    def read_head(self) -> bytes:
        """The head of the next answer, as it is."""
        return b"".join(iter(self._reader.readline, b"\r\n"))

    def read_chunk(self) -> bytes:
        """The next chunk of an answer; empty at its end."""
        data = self._reader.read(int(self._reader.readline(), 16))
        assert self._reader.read(2) == b"\r\n"
        return data

    def ask(self, data: bytes) -> Answer:
        self.send(data)
        return self.read()

    @property
    def is_closed(self) -> bool:
        """Whether the server closes the connection; waits for it."""
        try:
            return not self._reader.read(1)
        except ConnectionResetError:
            return True


def _encrypted(plain: socket.socket, name: str, tls: ssl.SSLContext) -> socket.socket:
    try:
        return tls.wrap_socket(plain, server_hostname=name)
    except BaseException:
        plain.close()
        raise


def get(path: str, headers: str = "", version: str = "1.1", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nHost: localhost\r\n{headers}\r\n".encode()


def post(body: bytes, headers: str = "", path: str = "/v2/models/m/infer", version: str = "1.1") -> bytes:
    return (
        f"POST {path} HTTP/{version}\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body
    )


def infer(value: float = 1, headers: str = "", version: str = "1.1", **more: Any) -> bytes:
    """A request for ``2 * [value, 0]``."""
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [value, 0]}
    return post(json.dumps({"inputs": [tensor | more]}).encode(), headers, version=version)
