"""All gRPC services of the server as one table of methods, independent of the transport."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from penstock.errors import PenstockError
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.auth import credential
from penstock.online.server.access.table import AccessTable, Guard
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.call import GrpcCall, GrpcMethod, Receiver
from penstock.online.server.grpc.control import GrpcControl
from penstock.online.server.grpc.health import Health
from penstock.online.server.grpc.inference import Inference, stopping
from penstock.online.server.grpc.reflection import VERSIONS, Reflection
from penstock.online.server.grpc.stream import InferStream
from penstock.tensor import Buffer

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

T = TypeVar("T")


class _Stream(Protocol):
    def drain(self, error: PenstockError) -> None: ...


class GrpcService:
    """Answers calls from the data plane and the control plane. Belongs to the event loop; the transport runs ``methods``."""

    def __init__(
        self,
        dataplane: DataPlane,
        control: ControlPlane,
        access: AccessTable,
        max_stream_requests: int,
        budget: ByteBudget | None = None,
    ) -> None:
        """``max_stream_requests`` (>= 1) of one stream are in progress at once; further ones wait. ``budget``: None is no limit.

        ``access`` guards every method and closes those that it does not list.
        """
        self._max_stream_requests = max_stream_requests
        self._inference = Inference(dataplane, budget)
        self._health = Health(lambda: dataplane.server_ready, frozenset({INFERENCE}))
        self._streams: set[_Stream] = set()
        self.methods = self._table(GrpcControl(dataplane, control, access.access), access)
        """The methods by path, as in HTTP/2's ``:path``: ``/inference.GRPCInferenceService/ModelInfer``."""

    def announce_health(self) -> None:
        """Send a change of readiness to the clients that watch it."""
        self._health.announce()

    def drain(self) -> None:
        """Refuse inference from now on, and end each stream once it is answered, so that no call keeps a connection open."""
        self._inference.stop()
        self._health.drain(stopping())
        for stream in tuple(self._streams):
            stream.drain(stopping())

    def _table(self, control: GrpcControl, access: AccessTable) -> dict[bytes, GrpcMethod]:
        unary = {f"{INFERENCE}/{name}": run for name, run in control.methods().items()}
        unary |= {f"{INFERENCE}/ModelInfer": self._inference.infer, f"{HEALTH}/Check": self._health.check}
        stream: dict[str, Callable[..., Receiver | None]] = {
            f"{INFERENCE}/ModelStreamInfer": self._infer_stream,
            f"{HEALTH}/Watch": self._health.watch,
        }
        for package in VERSIONS:
            stream[f"{package}.ServerReflection/ServerReflectionInfo"] = partial(self._reflect, package)
        guards = {path: access.of_method(path.rpartition("/")[2]) for path in (*unary, *stream)}
        table = {path: GrpcMethod(unary=_guarded(run, guards[path])) for path, run in unary.items()}
        table |= {path: GrpcMethod(stream=_guarded(start, guards[path])) for path, start in stream.items()}
        return {f"/{path}".encode(): method for path, method in table.items()}

    def _infer_stream(self, call: GrpcCall, client: str = "") -> Receiver | None:
        try:
            self._inference.check_open()
        except PenstockError as error:
            call.finish(error)
            return None
        stream = InferStream(call, client, self._inference, self._max_stream_requests, self._streams.discard)
        self._streams.add(stream)
        return stream

    def _reflect(self, package: str, call: GrpcCall, client: str = "") -> Receiver:
        services = [INFERENCE, HEALTH, *(f"{package}.ServerReflection" for package in VERSIONS)]
        stream = Reflection(call, package, services, self._streams.discard)
        self._streams.add(stream)
        return stream


def _guarded(run: Callable[..., T], guard: Guard | None) -> Callable[..., T | None]:
    """``run``, called with the client's name as the last argument once ``guard`` has admitted the call."""
    if guard is None:
        return run

    def guarded(call: GrpcCall, *data: Buffer) -> T | None:
        metadata = call.metadata
        try:
            client = guard(credential(metadata.get("authorization"), metadata.get("x-api-key")), metadata)
        except PenstockError as error:
            call.finish(error)
            return None
        return run(call, *data, client)

    return guarded
