"""A server in this process, composed like the real server but without sockets, to measure effects that sockets would hide. A
closed loop keeps a given number of requests in flight: each answer triggers the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.clock import SystemClock
from penstock.engines.base import LoadedModel
from penstock.errors import PenstockError
from penstock.online.instances.instance import Instance
from penstock.online.repository.handle import Handle
from penstock.online.repository.loading.input_check import InputCheck
from penstock.online.repository.loading.scheduling import batching
from penstock.online.repository.served import ServedModels
from penstock.online.repository.triton.auto_complete import complete
from penstock.online.repository.triton.check import parse
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.access.table import AccessTable
from penstock.online.server.config import ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.service import GrpcService
from penstock.online.server.h2 import connection as h2_connection
from penstock.online.server.http import connection as http_connection
from penstock.online.server.http.context import HttpContext
from penstock.online.server.http.resources import make_resources
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.network.connections import Connections
from penstock.online.server.processes.group import ProcessGroup
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.perf.grpc_client import INFER, GrpcConnection, Lane
from penstock.perf.http_client import Address, AnswerHead
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.telemetry.batch_log import BatchLog
from penstock.telemetry.logging import LogSettings
from penstock.telemetry.statistics import ModelStatistics
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer
from penstock.tensor import Array, DataType, Signature, TensorSpec

MAX_BATCH = 64


class NullModel(LoadedModel):
    """A model that returns its inputs and takes almost no time."""

    signature = Signature(
        (TensorSpec("input", DataType.FP32, (-1, 8)),), (TensorSpec("output", DataType.FP32, (-1, 8)),)
    )
    reentrant = True

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"output": inputs["input"]}

    def unload(self) -> None:
        """Do nothing, because there is no memory to release."""


NULL_INPUTS: Mapping[str, Array] = MappingProxyType({"input": np.zeros((1, 8), np.float32)})


class InProcess:
    """Serves one model, called ``m``. Requires a running event loop. ``close`` ends the model's thread."""

    def __init__(self, model: LoadedModel, log: type[BatchLog] = BatchLog) -> None:
        clock, config = SystemClock(), ServerConfig()
        statistics = ModelStatistics(name="m", version="1")
        described = complete(parse("m", {}), "m", "in_process", model.signature, MAX_BATCH, 1)
        tracer = Tracer(TraceSettings())
        batcher = DynamicBatcher(
            batching(described, config.max_queue), asyncio.get_running_loop(), statistics, tracer=tracer
        )
        batcher._answers._log = log(statistics)  # noqa: SLF001 - to measure what it costs
        self._batcher = batcher
        check = InputCheck(described, config.max_request_rows)
        handle = Handle("1", described, check, batcher, [model], [Instance("m-0", model, batcher)])
        handle.start()
        self._repository = ServedModels()
        self._repository.add(handle)
        shared_memory = SharedMemory(enabled=False)
        self.dataplane = DataPlane(self._repository, clock, shared_memory, tracer)
        metrics = MetricsPage(self._repository.statistics)
        control = ControlPlane(self._repository, shared_memory, tracer, LogSettings(), ProcessGroup(), metrics)
        connections = Connections(config.max_connections)
        access = Access(None, clock)
        table, resources = AccessTable(access), make_resources(self.dataplane, control, access, config)
        self._http = HttpContext(resources, table, config, connections, ByteBudget(0))
        self.service = GrpcService(self.dataplane, control, table, config.max_pipelined)
        self._h2 = h2_connection.H2Context(self.service.methods, config, connections, clock)

    @property
    def statistics(self) -> ModelStatistics:
        return self._batcher.statistics

    async def close(self) -> None:
        await self._repository.unload_all()

    async def infer(self, requests: int, in_flight: int, inputs: Mapping[str, Array] = NULL_INPUTS) -> None:
        """Pass ``requests`` requests directly to the data plane."""
        loop = _Countdown(requests)
        plane = self.dataplane
        handle = plane.acquire("m")

        def done(outcome: Outcome) -> None:
            if not isinstance(outcome, InferResponse):
                loop.fail(outcome)
            elif loop.next():
                plane.infer(handle, InferRequest("m", dict(inputs)), done)

        for _ in range(min(in_flight, requests)):
            loop.begin()
            plane.infer(handle, InferRequest("m", dict(inputs)), done)
        await loop.over

    async def http(self, requests: int, in_flight: int, whole: Sequence[bytes]) -> None:
        """Pass ``requests`` requests to HTTP connections. The requests are taken from ``whole`` in turn."""
        loop = _Countdown(requests)
        connections = [http_connection.Http1Connection(self._http) for _ in range(min(in_flight, requests))]
        call_soon = asyncio.get_running_loop().call_soon
        for number, connection in enumerate(connections):

            def answered(
                data: bytes, connection: Any = connection, request: bytes = whole[number % len(whole)]
            ) -> None:
                if not data.startswith(b"HTTP/1.1 200"):
                    loop.fail(RuntimeError(f"{data[:500]!r}"))
                elif loop.next():
                    call_soon(connection.data_received, request)

            connection.connection_made(Pipe(answered))
        for number, connection in enumerate(connections):
            loop.begin()
            connection.data_received(whole[number % len(whole)])
        await loop.over
        for connection in connections:
            connection.connection_lost(None)

    async def grpc(self, requests: int, in_flight: int, framed: Sequence[bytes]) -> None:
        """Make ``requests`` calls over one HTTP/2 connection with ``in_flight`` streams. The client also runs in this process."""
        loop = _Countdown(requests)
        address = Address("in-process", 1)
        head = [
            (":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", address.authority),
            ("te", "trailers"), ("content-type", "application/grpc"),
        ]  # fmt: skip
        client = GrpcConnection(
            head, in_flight, lambda _: None
        )  # need not wait, because little is sent before the server's settings
        server = h2_connection.H2Connection(self._h2)
        soon = asyncio.get_running_loop().call_soon
        server.connection_made(Pipe(lambda data: soon(client.data_received, data)))
        client.connection_made(Pipe(lambda data: soon(server.data_received, data)))

        def answered(lane: Lane, answer: AnswerHead) -> None:
            if answer.status != 200:
                loop.fail(RuntimeError(lane.body().decode(errors="replace")))
            elif loop.next():
                lane.send(framed[0], 0, 0.0, 0.0)

        for number in range(min(in_flight, requests)):
            loop.begin()
            client.lane(answered, lambda *_: None).send(framed[number % len(framed)], 0, 0.0, 0.0)
        await loop.over
        server.connection_lost(None)
        client.connection_lost(None)


class Pipe(asyncio.Transport):
    """A transport that passes written bytes to ``receive``."""

    def __init__(self, receive: Callable[[bytes], object]) -> None:
        super().__init__()
        self._receive = receive

    def write(self, data: Any) -> None:
        self._receive(data)

    def writelines(self, list_of_data: Any) -> None:
        self._receive(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def _nothing(self, *_: object) -> None:
        """Do nothing, because there is no socket."""

    close = abort = pause_reading = resume_reading = set_write_buffer_limits = _nothing


class _Countdown:
    """Counts the requests that have not begun, and the requests that are not answered yet."""

    def __init__(self, requests: int) -> None:
        self._to_begin = self._to_answer = requests
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        self._to_begin -= 1

    def next(self) -> bool:
        """Record that a request has been answered. Returns True if another request may begin."""
        self._to_answer -= 1
        if not self._to_answer and not self.over.done():
            self.over.set_result(None)
        if not self._to_begin:
            return False
        self._to_begin -= 1
        return True

    def fail(self, error: PenstockError | RuntimeError) -> None:
        if not self.over.done():
            self.over.set_exception(error)


def run(main: Any) -> Any:
    """Run ``main`` on the event loop that the server uses."""
    import uvloop  # noqa: PLC0415 - absent on Windows

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
