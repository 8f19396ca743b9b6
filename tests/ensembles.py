"""Ensembles put together as the server does it, over models whose forward waits until it is let through."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from google.protobuf import text_format

from handles import make_handle
from penstock.clock import SystemClock
from penstock.engines.base import LoadedModel
from penstock.errors import PenstockError
from penstock.online.cache.response_cache import ResponseCache
from penstock.online.repository.handle import Handle
from penstock.online.repository.loading.assembly import Assembler, RequestLimits
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.served import ServedModels
from penstock.online.repository.triton.schema import typed
from penstock.online.scheduler.ensemble import Models
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.protocol.messages import ModelConfig
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer
from penstock.tensor import Array
from penstock.testing import double

WAIT_S = 30


class Gate:
    """A ``forward`` that waits: ``await entered()`` until it has been called once more, ``open`` lets it through so many times."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self._entered = threading.Semaphore(0)
        self._open = threading.Semaphore(0)

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.batches.append(len(inputs["x"]))
        self._entered.release()
        assert self._open.acquire(timeout=WAIT_S)
        return double(inputs)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.acquire, timeout=WAIT_S)

    def open(self, times: int = 1) -> None:
        self._open.release(times)


class Bench:
    """A data plane and the models behind it, all of which ``close`` unloads."""

    def __init__(self, cache: ResponseCache | None = None, limits: RequestLimits | None = None) -> None:
        self.served = ServedModels()
        tracer = Tracer(TraceSettings())
        self.plane = DataPlane(self.served, SystemClock(), SharedMemory(enabled=False), tracer)
        self.plane.open()
        models = Models(self.served.find, self.plane.call)
        self.assembler = Assembler(limits or RequestLimits(), tracer, cache, models)
        self.handles: list[Handle] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for handle in reversed(self.handles):
            await handle.unload()

    def model(self, name: str, model: LoadedModel, version: str = "1", **more: Any) -> Handle:
        return self._serve(make_handle(model, name, version, **more))

    def ensemble(self, config: str, name: str = "e", version: str = "1") -> Handle:
        """``config`` in protobuf's text format."""
        source = ModelSource(name, Path(), {version: Path()}, typed(text_format.Parse(config, ModelConfig())))
        return self._serve(self.assembler.assemble_ensemble(source, version))

    def ask(self, model: str = "e", inputs: Mapping[str, Any] | None = None, **more: Any) -> Asked:
        arrays = {name: np.asarray(array) for name, array in (inputs or {}).items()}
        return Asked(self.plane, InferRequest(model, arrays, **more))

    async def outputs(self, model: str = "e", inputs: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        return {
            name: array.tolist() for name, array in (await self.ask(model, inputs, **more).response).outputs.items()
        }

    def _serve(self, handle: Handle) -> Handle:
        handle.start()
        self.served.add(handle)
        self.handles.append(handle)
        return handle


class Asked:
    """A request that was made."""

    def __init__(self, plane: DataPlane, request: InferRequest) -> None:
        self.outcomes: list[Outcome] = []
        self._ended = asyncio.Event()
        self._work = None
        try:
            handle = plane.acquire(request.model_name, request.model_version)
        except PenstockError as error:
            self._done(error)
        else:
            self._work = plane.infer(handle, request, self._done)

    def _done(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._ended.set()

    def cancel(self) -> None:
        if self._work is not None:
            self._work.cancel()

    @property
    async def outcome(self) -> Outcome:
        async with asyncio.timeout(WAIT_S):
            await self._ended.wait()
        (outcome,) = self.outcomes
        return outcome

    @property
    async def response(self) -> InferResponse:
        outcome = await self.outcome
        assert isinstance(outcome, InferResponse), outcome
        return outcome

    @property
    async def error(self) -> Any:
        outcome = await self.outcome
        assert not isinstance(outcome, InferResponse)
        return outcome


def tensor(kind: str, name: str, datatype: str = "FP32", dims: str = "2", more: str = "") -> str:
    """``kind`` is input or output."""
    return f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: [{dims}] {more} }}\n'


def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: int = -1) -> str:
    maps = [f'input_map {{ key: "{own}" value: "{name}" }}' for own, name in inputs.items()]
    maps += [f'output_map {{ key: "{own}" value: "{name}" }}' for own, name in outputs.items()]
    return f'step {{ model_name: "{model}" model_version: {version} {" ".join(maps)} }}\n'


def ensemble(*steps: str, tensors: str = "", batch: int = 4, inside: int = 0, more: str = "") -> str:
    """From X to Y, both FP32 (-1, 2), unless ``tensors`` are others."""
    tensors = tensors or tensor("input", "X") + tensor("output", "Y")
    limit = f"max_inflight_requests: {inside}" if inside else ""
    return f"max_batch_size: {batch}\n{tensors}ensemble_scheduling {{ {limit} {''.join(steps)} }}\n{more}"


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def chain(*models: str) -> list[str]:
    """Steps from x to y of each model, one after the other, from X to Y."""
    names = ["X", *(f"t{n}" for n in range(1, len(models))), "Y"]
    return [step(model, {"x": names[n]}, {"y": names[n + 1]}) for n, model in enumerate(models)]
