import asyncio
from typing import Any

from calls import FakeCall
from penstock.clock import SystemClock
from penstock.errors import Code
from penstock.online.repository.served import ServedModels
from penstock.online.server.access.auth import Access
from penstock.online.server.access.table import AccessTable
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.reflection import VERSIONS
from penstock.online.server.grpc.service import HEALTH, INFERENCE, GrpcService
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.processes.group import ProcessGroup
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.protocol import messages
from penstock.telemetry.logging import LogSettings
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer


def service() -> GrpcService:
    repository, memory, tracer = ServedModels(), SharedMemory(enabled=False), Tracer(TraceSettings())
    control = ControlPlane(
        repository, memory, tracer, LogSettings(), ProcessGroup(), MetricsPage(repository.statistics)
    )
    dataplane = DataPlane(repository, SystemClock(), memory, tracer)
    return GrpcService(dataplane, control, AccessTable(Access(None, SystemClock())), 8)


REFLECTION = [f"{package}.ServerReflection" for package in VERSIONS]


def rpcs() -> dict[bytes, Any]:
    """Tests every RPC of the schema by its path."""
    return {
        f"/{service.full_name}/{rpc.name}".encode(): rpc
        for service in map(messages.POOL.FindServiceByName, (INFERENCE, HEALTH, *REFLECTION))
        for rpc in service.methods
    }


def test_every_rpc_of_the_schema_is_there_in_its_kind() -> None:
    methods, wanted = service().methods, rpcs()
    assert methods.keys() == wanted.keys()
    for path, rpc in wanted.items():
        streams = rpc.client_streaming or rpc.server_streaming
        assert (methods[path].stream is not None, methods[path].unary is None) == (streams, streams)


def test_a_service_that_stops_refuses_inference_and_nothing_else() -> None:
    stopping = service()
    infer, live = (
        stopping.methods[f"/inference.GRPCInferenceService/{name}".encode()] for name in ("ModelInfer", "ServerLive")
    )
    stream = stopping.methods[b"/inference.GRPCInferenceService/ModelStreamInfer"].stream
    reflect = stopping.methods[b"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"].stream
    assert infer.unary
    assert live.unary
    assert stream
    assert reflect
    open_calls = [FakeCall(), FakeCall()]
    stream(open_calls[0])
    reflect(open_calls[1])
    stopping.drain()
    calls = [FakeCall(), FakeCall()]
    infer.unary(calls[0], b"")
    assert stream(calls[1]) is None
    for call in [*open_calls, *calls]:
        assert call.error is not None
        assert call.error.code is Code.UNAVAILABLE
        assert str(call.error) == "GRPC server is shutting down and has stopped accepting new requests."
    probe = FakeCall()
    live.unary(probe, b"")
    assert probe.error is None


def test_streams_that_are_over_are_forgotten() -> None:
    async def run() -> None:
        there = service()
        for path in (b"/inference.GRPCInferenceService/ModelStreamInfer", b"/grpc.health.v1.Health/Watch"):
            stream = there.methods[path].stream
            assert stream
            for end in (lambda call, receiver: call.cancel(), lambda call, receiver: receiver.half_close()):
                call = FakeCall()
                receiver = stream(call)
                end(call, receiver)
        assert not there._streams
        assert not there._health._watches

    asyncio.run(run())
