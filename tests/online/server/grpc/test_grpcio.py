from queue import Queue
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from conformance.grpc import GrpcConformance
from gated_grpc import GrpcServer, floats
from penstock.clock import SystemClock
from penstock.errors import InvalidConfig
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.config import ServerConfig
from penstock.online.server.grpc.grpcio import GrpcioServer


class TestConformance(GrpcConformance):
    make = staticmethod(lambda service, config: GrpcioServer(service, config, 0, SystemClock()))


def test_the_bytes_of_all_requests_together_are_bounded() -> None:
    budget = ByteBudget(1000)
    make = lambda service, config: GrpcioServer(service, config, 0, SystemClock(), budget)  # noqa: E731
    with GrpcServer(make) as server:
        client = server.client()
        server.gate.clear()
        answers: Queue[Any] = Queue()
        client.async_infer("gated", [floats(*[1.0] * 150)], lambda result, error: answers.put(error))
        assert server.entered.acquire(timeout=20)
        assert budget.used > 600
        with pytest.raises(InferenceServerException, match="as many bytes of requests as it may"):
            client.infer("gated", [floats(*[1.0] * 150)])
        server.gate.set()
        assert answers.get(timeout=20) is None
        server.until(lambda: budget.used == 0)


def test_addresses_and_files_that_cannot_be_used_are_told() -> None:
    with GrpcServer(TestConformance.make) as taken:
        for port, config, error in (
            (taken.address[1], {}, OSError),
            (0, {"tls_certificate": "/nowhere.pem"}, InvalidConfig),
        ):
            with pytest.raises(error):
                taken.call(lambda port=port, config=config: refuse(taken, port, config))


async def refuse(taken: GrpcServer, port: int, config: dict[str, Any]) -> None:
    """Start a second server that cannot be."""
    server = GrpcioServer(taken.service, ServerConfig(**config), port, SystemClock())
    try:
        await server.start()
    finally:
        await server.stop()
