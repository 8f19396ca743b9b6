"""A gRPC server in a thread, over fake and real models, on whichever transport; and clients of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import grpc
import numpy as np
import tritonclient.grpc as triton

import models
from handles import make_handle
from penstock.clock import SystemClock
from penstock.engines.registry import get_engine
from penstock.errors import PenstockError
from penstock.online.repository.served import ServedModels
from penstock.online.server.access.admission import Admission, ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.access.table import AccessTable
from penstock.online.server.config import ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.service import GrpcService
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.processes.group import ProcessGroup
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.protocol import messages
from penstock.telemetry.logging import LogSettings
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer
from penstock.tensor import Array, DataType, Signature, TensorSpec
from penstock.testing import DOUBLER, FakeModel, FakeStreamingModel, double

PATIENCE_S = 20
FREE = Signature((TensorSpec("x", DataType.FP32, (-1, -1)),), (TensorSpec("y", DataType.FP32, (-1, -1)),))


class Transport(Protocol):
    """What a suite needs of one."""

    async def start(self) -> tuple[str, int]: ...

    async def drain(self, grace_s: float, timeout_s: float) -> None: ...

    async def stop(self) -> None: ...


MakeTransport = Callable[[GrpcService, ServerConfig], Transport]


class GrpcServer:
    """Serves, while ``gate`` is clear, nothing of model ``gated``; ``entered`` counts the batches that wait there.

    ``double`` is the same without a gate, ``failing`` raises, ``repeat`` is decoupled and gives one answer for each row,
    ``endless`` never stops answering, ``linear``, ``sums`` and ``identity_<datatype>`` run on ONNX Runtime.
    """

    def __init__(self, make: MakeTransport, access: Path | None = None, **config: Any) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.gated = FakeModel(FREE, self._forward)
        self.endless = FakeStreamingModel(FREE, self._answer_for_ever)
        self._make = make
        self._access = access
        self.config = ServerConfig(http_port=0, **config)
        self.budget = ByteBudget(self.config.max_inflight_bytes)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
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

    @property
    def url(self) -> str:
        return "{}:{}".format(*self.address)

    def client(self, **options: Any) -> triton.InferenceServerClient:
        return self._clients.enter_context(triton.InferenceServerClient(self.url, **options))

    def channel(self, credentials: grpc.ChannelCredentials | None = None, **options: Any) -> grpc.Channel:
        # Channels with the same settings would share one connection.
        settings = [("grpc.use_local_subchannel_pool", 1), *options.pop("settings", ())]
        if credentials is None:
            return self._clients.enter_context(grpc.insecure_channel(self.url, settings, **options))
        return self._clients.enter_context(grpc.secure_channel(self.url, credentials, settings, **options))

    def call(self, function: Callable[[], Any]) -> Any:
        """``function()`` on the server's event loop."""

        async def run() -> Any:
            result = function()
            return await result if isinstance(result, Awaitable) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def start(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Begin ``await function()`` on the server's event loop; a future."""

        async def run() -> Any:
            return await function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop)

    def pending(self, model: str) -> int:
        """How many requests of ``model`` are accepted and not answered."""
        return int(self.call(lambda: self.repository.find(model).statistics.pending))

    def until(self, condition: Callable[[], bool]) -> None:
        """Return when ``condition()`` holds."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, "it never came to hold"

    def _forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.entered.release()
        assert self.gate.wait(PATIENCE_S)
        return double(inputs)

    def _answer_for_ever(self, inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        while True:
            yield {"y": np.zeros((1, 1 << 18), np.float32)}

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.repository = ServedModels()
        for handle in self._handles():
            handle.start()
            self.repository.add(handle)
        self.shared_memory, tracer = SharedMemory(enabled=True), Tracer(TraceSettings())
        access = Access(self._access, SystemClock())
        admission = Admission(access, SystemClock()) if access.enabled else None
        table = AccessTable(access, admission=admission)
        self.dataplane = DataPlane(self.repository, SystemClock(), self.shared_memory, tracer, admission)
        self.dataplane.open()
        control = ControlPlane(
            self.repository,
            self.shared_memory,
            tracer,
            LogSettings(),
            ProcessGroup(),
            MetricsPage(self.repository.statistics),
        )
        self.service = GrpcService(self.dataplane, control, table, self.config.max_pipelined, self.budget)
        self.transport = self._make(self.service, self.config)
        self.address = await self.transport.start()
        self._started.set()
        await self._stop.wait()
        await self.transport.stop()
        await self.repository.unload_all()
        self.shared_memory.close()

    def _handles(self) -> Iterator[Any]:
        queue = self.config.max_queue
        yield make_handle(self.gated, "gated", max_queue=queue)
        yield make_handle(FakeModel(DOUBLER, double), "double")
        yield make_handle(FakeModel(FREE, double), "wide", max_batch=8)
        yield make_handle(FakeModel(DOUBLER, _fail), "failing")
        yield make_handle(FakeStreamingModel(DOUBLER), "repeat", max_batch=None)
        yield make_handle(self.endless, "endless", max_batch=None)
        engine = get_engine("onnxruntime")
        artifacts = {f"identity_{datatype.value}": models.identity(datatype) for datatype in DataType}
        artifacts |= {"linear": models.linear(), "sums": models.sum_and_difference()}
        for name, artifact in artifacts.items():
            yield make_handle(engine.load(artifact, {"threads": 1}), name)


def _fail(inputs: Mapping[str, Array]) -> dict[str, Array]:
    raise PenstockError("the model failed: on purpose")


def tensor(array: np.ndarray, name: str = "x") -> triton.InferInput:
    given = triton.InferInput(name, list(array.shape), DataType.from_numpy(array.dtype).value)
    given.set_data_from_numpy(array)
    return given


def floats(*values: float) -> triton.InferInput:
    """One row of FP32 as input ``x``."""
    return tensor(np.array([values], np.float32))


def request(model: str, *values: float, **fields: Any) -> Any:
    """A ModelInferRequest of one row of FP32."""
    message = messages.ModelInferRequest(model_name=model, **fields)
    message.inputs.add(name="x", datatype="FP32", shape=[1, len(values)])
    message.raw_input_contents.append(np.array(values, np.float32).tobytes())
    return message


def result(data: bytes) -> list[float]:
    """What the first output of a serialized ModelInferResponse holds."""
    raw = messages.ModelInferResponse.FromString(data).raw_output_contents[0]
    return list(np.frombuffer(raw, np.float32).tolist())


def infer_method(channel: grpc.Channel) -> Any:
    """ModelInfer of and to bytes."""
    return channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")


def stream_method(channel: grpc.Channel) -> Any:
    """ModelStreamInfer of and to bytes."""
    return channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
