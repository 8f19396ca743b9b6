"""All that is offered over gRPC, as one table of methods, free of any transport."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from penstock.errors import PenstockError
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.call import Call, Deaf, Method, Receiver
from penstock.online.server.grpc.control import GrpcControl
from penstock.online.server.grpc.health import Health
from penstock.online.server.grpc.inference import Inference, stopping
from penstock.online.server.grpc.reflection import VERSIONS, Reflection
from penstock.online.server.grpc.stream import InferStream

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"


class _Stream(Protocol):
    def drain(self, error: PenstockError) -> None: ...


class GrpcService:
    """Answers calls from the planes. Belongs to the event loop; the transports run ``methods``."""

    def __init__(
        self,
        dataplane: DataPlane,
        control: ControlPlane,
        access: Access,
        max_stream_requests: int,
        budget: ByteBudget | None = None,
    ) -> None:
        """``max_stream_requests`` (>= 1) are worked on at once for one stream; more wait. ``budget``: None is no limit."""
        self._max_stream_requests = max_stream_requests
        self._inference = Inference(dataplane, access, budget)
        self._health = Health(lambda: dataplane.server_ready, frozenset({INFERENCE}))
        self._streams: set[_Stream] = set()
        self.methods = self._table(GrpcControl(dataplane, control, access))
        """By path."""

    def announce_health(self) -> None:
        """Tell those who watch the health that it has changed."""
        self._health.look()

    def drain(self) -> None:
        """Refuse inference from now on, and end each stream once it is answered, so that a transport can wait for all calls."""
        self._inference.is_stopping = True
        self._health.drain(stopping())
        for stream in tuple(self._streams):
            stream.drain(stopping())

    def _table(self, control: GrpcControl) -> dict[bytes, Method]:
        unary = {f"{INFERENCE}/{name}": run for name, run in control.methods().items()}
        unary |= {f"{INFERENCE}/ModelInfer": self._inference.infer, f"{HEALTH}/Check": self._health.check}
        stream = {f"{INFERENCE}/ModelStreamInfer": self._infer_stream, f"{HEALTH}/Watch": self._health.watch}
        for package in VERSIONS:
            stream[f"{package}.ServerReflection/ServerReflectionInfo"] = partial(self._reflect, package)
        table = [Method(f"/{path}".encode(), unary=run) for path, run in unary.items()]
        table += [Method(f"/{path}".encode(), stream=start) for path, start in stream.items()]
        return {method.path: method for method in table}

    def _infer_stream(self, call: Call) -> Receiver:
        try:
            client = self._inference.admit(call)
        except PenstockError as error:
            call.finish(error)
            return Deaf()
        stream = InferStream(call, client, self._inference, self._max_stream_requests, self._streams.discard)
        self._streams.add(stream)
        return stream

    def _reflect(self, package: str, call: Call) -> Receiver:
        services = [INFERENCE, HEALTH, *(f"{package}.ServerReflection" for package in VERSIONS)]
        stream = Reflection(call, package, services, self._streams.discard)
        self._streams.add(stream)
        return stream
