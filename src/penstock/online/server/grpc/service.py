"""All that is offered over gRPC, as one table of methods, free of any transport."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from penstock.errors import PenstockError
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.auth import credential
from penstock.online.server.access.table import AccessTable, Guard
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.call import ClosedReceiver, GrpcCall, GrpcMethod, Receiver, Streaming, Unary
from penstock.online.server.grpc.control import GrpcControl
from penstock.online.server.grpc.health import Health
from penstock.online.server.grpc.inference import Inference, stopping
from penstock.online.server.grpc.reflection import VERSIONS, Reflection
from penstock.online.server.grpc.stream import InferStream
from penstock.tensor import Buffer

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
        access: AccessTable,
        max_stream_requests: int,
        budget: ByteBudget | None = None,
    ) -> None:
        """``max_stream_requests`` (>= 1) are worked on at once for one stream; more wait. ``budget``: None is no limit.

        ``access`` guards every method; one that is not in it is closed.
        """
        self._max_stream_requests = max_stream_requests
        self._inference = Inference(dataplane, budget)
        self._health = Health(lambda: dataplane.server_ready, frozenset({INFERENCE}))
        self._streams: set[_Stream] = set()
        self.methods = self._table(GrpcControl(dataplane, control, access.access), access)
        """By path."""

    def announce_health(self) -> None:
        """Tell those who watch the health that it has changed."""
        self._health.look()

    def drain(self) -> None:
        """Refuse inference from now on, and end each stream once it is answered, so that a transport can wait for all calls."""
        self._inference.stop()
        self._health.drain(stopping())
        for stream in tuple(self._streams):
            stream.drain(stopping())

    def _table(self, control: GrpcControl, access: AccessTable) -> dict[bytes, GrpcMethod]:
        unary: dict[str, Unary] = {f"{INFERENCE}/{name}": run for name, run in control.methods().items()}
        unary |= {f"{INFERENCE}/ModelInfer": self._inference.infer, f"{HEALTH}/Check": self._health.check}
        stream: dict[str, Streaming] = {
            f"{INFERENCE}/ModelStreamInfer": self._infer_stream,
            f"{HEALTH}/Watch": self._health.watch,
        }
        for package in VERSIONS:
            stream[f"{package}.ServerReflection/ServerReflectionInfo"] = partial(self._reflect, package)
        table = [
            GrpcMethod(f"/{path}".encode(), unary=_guarded_unary(run, access.of_method(_name(path))))
            for path, run in unary.items()
        ]
        table += [
            GrpcMethod(f"/{path}".encode(), stream=_guarded_stream(start, access.of_method(_name(path))))
            for path, start in stream.items()
        ]
        return {method.path: method for method in table}

    def _infer_stream(self, call: GrpcCall, client: str = "") -> Receiver:
        try:
            self._inference.check_open()
        except PenstockError as error:
            call.finish(error)
            return ClosedReceiver()
        stream = InferStream(call, client, self._inference, self._max_stream_requests, self._streams.discard)
        self._streams.add(stream)
        return stream

    def _reflect(self, package: str, call: GrpcCall, client: str = "") -> Receiver:
        services = [INFERENCE, HEALTH, *(f"{package}.ServerReflection" for package in VERSIONS)]
        stream = Reflection(call, package, services, self._streams.discard)
        self._streams.add(stream)
        return stream


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _admit(guard: Guard, call: GrpcCall) -> str:
    """The client's name. Raises what the guard raises."""
    metadata = call.metadata
    return guard(credential(metadata.get("authorization"), metadata.get("x-api-key")), metadata)


def _guarded_unary(run: Unary, guard: Guard | None) -> Unary:
    if guard is None:
        return run

    def guarded(call: GrpcCall, data: Buffer, client: str = "") -> None:
        try:
            client = _admit(guard, call)
        except PenstockError as error:
            call.finish(error)
        else:
            run(call, data, client)

    return guarded


def _guarded_stream(start: Streaming, guard: Guard | None) -> Streaming:
    if guard is None:
        return start

    def guarded(call: GrpcCall, client: str = "") -> Receiver:
        try:
            client = _admit(guard, call)
        except PenstockError as error:
            call.finish(error)
            return ClosedReceiver()
        return start(call, client)

    return guarded
