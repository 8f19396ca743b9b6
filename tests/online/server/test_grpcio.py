from conformance.grpc import GrpcConformance
from penstock.clock import SystemClock
from penstock.online.server.grpcio import GrpcioServer


class TestConformance(GrpcConformance):
    make = staticmethod(lambda service, config: GrpcioServer(service, config, 0, SystemClock()))
