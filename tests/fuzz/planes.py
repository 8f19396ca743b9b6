"""The whole server below its sockets, on a ``FastLoop``: real planes, codecs and services over models that answer without threads."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
import numpy as np

from penstock.errors import Cancelled, PenstockError, Unavailable
from penstock.online.repository.handle import Handle
from penstock.online.repository.loading.input_check import InputCheck
from penstock.online.repository.loading.scheduling import batching
from penstock.online.repository.served import ServedModels
from penstock.online.repository.triton.auto_complete import complete
from penstock.online.repository.triton.check import parse
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.access.table import AccessTable
from penstock.online.server.config import ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.service import GrpcService
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.network.connections import Connections
from penstock.online.server.processes.group import ProcessGroup
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.logging import LogSettings
from penstock.telemetry.statistics import ModelStatistics
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer
from penstock.tensor import Array, DataType, Signature, TensorSpec
from penstock.testing import FakeModel, FakeStreamingModel
from tests.fuzz.fast_loop import FastLoop

_LATE_S = 0.05
_MAX_PENDING = 200

TEXT = Signature((TensorSpec("t", DataType.BYTES, (-1, 1)),), (TensorSpec("t", DataType.BYTES, (-1, 1)),))
PAIR = Signature(
    (TensorSpec("a", DataType.INT32, (-1,)), TensorSpec("b", DataType.BOOL, (-1, -1))),
    (TensorSpec("a", DataType.INT32, (-1,)), TensorSpec("b", DataType.BOOL, (-1, -1))),
)


class Planes:
    """Models ``m`` (y = 2 x), ``text`` and ``pair`` (which give back what they get) and the decoupled ``repeat``."""

    def __init__(self, loop: FastLoop) -> None:
        """``loop`` must be running."""
        self.config = ServerConfig(
            http_port=0,
            max_request_bytes=64 << 10,
            max_inflight_bytes=256 << 10,
            max_header_bytes=4096,
            max_unsent_bytes=64 << 10,
            max_pipelined=8,
            max_streams=16,
            max_connections=4,
            request_timeout_s=10,
            idle_timeout_s=20,
        )
        self.schedulers: list[Scheduler] = []
        repository = ServedModels()
        for name, model in {
            "m": FakeModel(),
            "text": FakeModel(TEXT, dict),
            "pair": FakeModel(PAIR, dict),
            "repeat": FakeStreamingModel(),
        }.items():
            repository.add(self._handle(loop, name, model))
        self.shared_memory = SharedMemory(enabled=True)
        tracer = Tracer(TraceSettings())
        self.dataplane = DataPlane(repository, loop, self.shared_memory, tracer)
        self.dataplane.open()
        metrics = MetricsPage(repository.statistics)
        self.control = ControlPlane(repository, self.shared_memory, tracer, LogSettings(), ProcessGroup(), metrics)
        self.access = Access(None, loop)
        self.table = AccessTable(self.access)
        self.budget = ByteBudget(self.config.max_inflight_bytes)
        self.connections = Connections(self.config.max_connections)
        self.service = GrpcService(self.dataplane, self.control, self.table, self.config.max_pipelined, self.budget)

    def check_idle(self) -> None:
        """Whatever has been asked is over, and nothing is held for it."""
        assert len(self.connections) == 0, "a connection is still counted"
        assert self.budget.used == 0, f"{self.budget.used} bytes of the budget were not given back"
        for scheduler in self.schedulers:
            assert not scheduler.pending, f"{scheduler.pending} requests are still under way"
        assert not self.service._streams, "a stream is still remembered"

    def _handle(self, loop: FastLoop, name: str, model: FakeModel | FakeStreamingModel) -> Handle:
        decoupled = isinstance(model, FakeStreamingModel)
        config = complete(parse(name, {}), name, "fake", model.signature, 8, 1, decoupled=decoupled)
        scheduler = Scheduler(loop, model, batching(config, 4096), ModelStatistics(name=name, version="1"))
        self.schedulers.append(scheduler)
        return Handle("1", config, InputCheck(config, 8), scheduler, [model])  # type: ignore[arg-type]


class Asked(msgspec.Struct, eq=False):
    """A request that has not been answered; can be cancelled."""

    scheduler: Scheduler
    done: Done
    is_over: bool = False

    def cancel(self) -> None:
        self.end(Cancelled("the request was cancelled"))

    def end(self, outcome: Outcome) -> None:
        if not self.is_over:
            self.is_over = isinstance(outcome, PenstockError) or outcome.final
            self.scheduler.pending -= self.is_over
            self.done(outcome)


class Scheduler:
    """In place of the batcher: answers in turn at once, in the next turn of the loop, and late."""

    def __init__(
        self,
        loop: FastLoop,
        model: FakeModel | FakeStreamingModel,
        config: BatchingConfig,
        statistics: ModelStatistics,
    ) -> None:
        self.config = config
        self.statistics = statistics
        self.pending = 0
        self.count = 0
        self._loop = loop
        self._model = model

    def submit(self, request: InferRequest, rows: int, key: Hashable, done: Done) -> Asked | None:
        if self.pending >= _MAX_PENDING:
            raise Unavailable("the queue is full", "", 1.0)
        self.count += 1
        self.pending += 1
        asked = Asked(self, done)
        match self.count % 3:
            case 0:
                self._answer(asked, request)
                return None
            case 1:
                self._loop.call_soon(self._answer, asked, request)
            case 2:
                self._loop.call_later(_LATE_S, self._answer, asked, request)
        return asked

    def _answer(self, asked: Asked, request: InferRequest) -> None:
        with np.errstate(all="ignore"):
            self._run(asked, request)

    def _run(self, asked: Asked, request: InferRequest) -> None:
        for array in request.inputs.values():
            touch(array)
        name, version = request.model_name, request.model_version
        if isinstance(self._model, FakeStreamingModel):
            for outputs in self._model._stream(request.inputs):
                asked.end(InferResponse(name, version, outputs, request.id, final=False))
            asked.end(InferResponse(name, version, {}, request.id))
        else:
            outputs = self._model._forward(request.inputs)
            wanted = {one: outputs[one] for one in request.outputs} if request.outputs else outputs
            asked.end(InferResponse(name, version, wanted, request.id))


def touch(array: Array) -> int:
    """Read all of ``array``, as a model would; how many bytes it has."""
    if array.dtype == np.object_:
        return sum(len(element) for element in array.reshape(-1).tolist())
    np.ascontiguousarray(array).view(np.uint8).sum()
    return array.nbytes
