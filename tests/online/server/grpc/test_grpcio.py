from typing import Any

import pytest

from conformance.grpc import GrpcConformance
from gated_grpc import GrpcServer
from penstock.clock import SystemClock
from penstock.errors import InvalidConfig
from penstock.online.server.config import ServerConfig
from penstock.online.server.grpc.grpcio import GrpcioServer


class TestConformance(GrpcConformance):
    make = staticmethod(lambda service, config: GrpcioServer(service, config, 0, SystemClock()))


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
