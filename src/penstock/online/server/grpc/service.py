"""All gRPC services of the server as one table of methods, independent of the transport."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from penstock.errors import PenstockError
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.auth import credential
from penstock.online.server.access.table import AccessTable, Guard
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.call import CALL_UNITS, GrpcCall, GrpcMethod, Metadata, Receiver
from penstock.online.server.grpc.control import GrpcControl
from penstock.online.server.grpc.health import Health
from penstock.online.server.grpc.inference import Inference, stopping
from penstock.online.server.grpc.reflection import VERSIONS, Reflection
from penstock.online.server.grpc.stream import InferStream

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

_SMALL_BYTES = 64 << 10
_LARGE = frozenset({"ModelInfer", "ModelStreamInfer", "RepositoryModelLoad"})
"""Methods whose messages may be as large as the server allows. Messages of all other methods are limited to ``_SMALL_BYTES``."""
_CHECKS = frozenset({"Check", "Watch", "ServerLive", "ServerReady", "ModelReady", "ModelInfer", "ModelStreamInfer"})
"""Methods whose messages cost no more than the default of ``GrpcMethod.units``."""
_CONTROL_UNITS = 24
_REFLECTION_UNITS = 160
"""The response may list all types."""


class _Stream(Protocol):
    def drain(self, error: PenstockError) -> None: ...


class GrpcService:
    """Answers calls with the data plane and the control plane. The transport runs ``methods``. Used only on the event loop."""

    def __init__(
        self,
        dataplane: DataPlane,
        control: ControlPlane,
        access: AccessTable,
        max_stream_requests: int,
        budget: ByteBudget | None = None,
    ) -> None:
        """At most ``max_stream_requests`` (>= 1) requests of a stream run at once. Without ``budget``, memory is unlimited."""
        self._max_stream_requests = max_stream_requests
        self._inference = Inference(dataplane, budget)
        self._health = Health(lambda: dataplane.server_ready, frozenset({INFERENCE}))
        self._streams: set[_Stream] = set()
        self._control = GrpcControl(dataplane, control, access.access)
        self.methods = self.methods_of(access)
        """The methods by path, as in HTTP/2's ``:path``: ``/inference.GRPCInferenceService/ModelInfer``."""

    def methods_of(self, access: AccessTable) -> dict[bytes, GrpcMethod]:
        """The methods by path, each with its guard from ``access``. Methods without an access rule refuse all calls."""
        unary = {f"{INFERENCE}/{name}": run for name, run in self._control.methods().items()}
        unary |= {f"{INFERENCE}/ModelInfer": self._inference.infer, f"{HEALTH}/Check": self._health.check}
        stream: dict[str, Callable[[GrpcCall], Receiver | None]] = {
            f"{INFERENCE}/ModelStreamInfer": self._infer_stream,
            f"{HEALTH}/Watch": self._health.watch,
        }
        for package in VERSIONS:
            stream[f"{package}.ServerReflection/ServerReflectionInfo"] = partial(self._reflect, package)
        table: dict[bytes, GrpcMethod] = {}
        for path in (*unary, *stream):
            name = path.rpartition("/")[2]
            table[f"/{path}".encode()] = GrpcMethod(
                unary.get(path),
                stream.get(path),
                _admitting(access.of_method(name)),
                None if name in _LARGE else _SMALL_BYTES,
                _units(name),
            )
        return table

    def announce_health(self) -> None:
        """If the server's readiness has changed, notify the clients that watch it."""
        self._health.announce()

    def drain(self) -> None:
        """From now on, refuse inference requests. End each stream once its requests are answered, so that connections can close."""
        self._inference.stop()
        self._health.drain(stopping())
        for stream in tuple(self._streams):
            stream.drain(stopping())

    def _infer_stream(self, call: GrpcCall) -> Receiver | None:
        try:
            self._inference.check_open()
        except PenstockError as error:
            call.finish(error)
            return None
        stream = InferStream(call, self._inference, self._max_stream_requests, self._streams.discard)
        self._streams.add(stream)
        return stream

    def _reflect(self, package: str, call: GrpcCall) -> Receiver:
        services = [INFERENCE, HEALTH, *(f"{package}.ServerReflection" for package in VERSIONS)]
        stream = Reflection(call, package, services, self._streams.discard)
        self._streams.add(stream)
        return stream


def _units(name: str) -> int:
    """See ``GrpcMethod.units``."""
    if name in _CHECKS:
        return CALL_UNITS
    return _REFLECTION_UNITS if name == "ServerReflectionInfo" else _CONTROL_UNITS


def _admitting(guard: Guard | None) -> Callable[[Metadata], str] | None:
    if guard is None:
        return None

    def admit(metadata: Metadata) -> str:
        return guard(credential(metadata.get("authorization"), metadata.get("x-api-key")), metadata)

    return admit
