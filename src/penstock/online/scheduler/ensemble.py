"""The scheduler of an ensemble. It has no instances, and passes each request from model to model.

Every step sends a request to the scheduler of the step's model. That scheduler may merge it with requests from other ensembles and
from clients. The models are looked up when a request to the ensemble arrives, and stay loaded until this request ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from penstock.errors import NotFound, Unavailable
from penstock.online.scheduler.base import Cancellable, Scheduler
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.graph import GraphScheduler, Passing
from penstock.online.scheduler.layout import Reshape
from penstock.pipeline.executor import PipelineRun, Told
from penstock.pipeline.graph import Graph, PipelineStep
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import ModelStatistics
from penstock.telemetry.tracing import Tracer
from penstock.tensor import Array, Signature

Key = tuple[str, str]
"""A model's name and version; an empty version lets the server choose."""


class EnsemblePart(Protocol):
    """The part of a handle's interface that ensembles use."""

    name: str
    version: str
    signature: Signature
    scheduler: Scheduler
    identity: str

    @property
    def is_healthy(self) -> bool: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...


_Part = TypeVar("_Part", bound=EnsemblePart)


class Models(NamedTuple, Generic[_Part]):
    """Access to the served models. ``find`` looks up a model or raises NotFound. ``call`` submits a request to a model."""

    find: Callable[[str, str], _Part]
    call: Callable[[InferRequest, Done, _Part], Cancellable | None]


class Ensemble(msgspec.Struct, frozen=True):
    """The checked configuration of an ensemble."""

    name: str
    graph: Graph
    models: Mapping[str, Key]
    """The model of each step, by the name of the step."""
    ranks: Mapping[str, int]
    """The number of dimensions of each output before ``reshapes``, including the batch dimension."""
    reshapes: Mapping[str, Reshape]
    """Reshapes of the inputs and outputs that have different shapes for clients and models."""
    max_inside: int = 0
    """Maximum number of requests in progress. Further requests wait. 0 means no limit."""


class EnsembleScheduler(GraphScheduler, Generic[_Part]):
    """The ``Scheduler`` that the module's docstring describes."""

    def __init__(
        self,
        ensemble: Ensemble,
        config: BatchingConfig,
        models: Models[_Part],
        loop: asyncio.AbstractEventLoop,
        statistics: ModelStatistics,
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(f"ensemble '{ensemble.name}'", ensemble.max_inside, config, loop, statistics, tracer)
        self.ensemble = ensemble
        self._whole = ensemble.graph.plan(ensemble.graph.outputs)
        self._models = models

    @property
    def is_healthy(self) -> bool:
        """True if all models of the ensemble are served and can run."""
        try:
            return all(handle.is_healthy for handle in self.resolve({}).values())
        except NotFound:
            return False

    @property
    def identity(self) -> str:
        """An identifier of the content of all models of the ensemble. While a model is not served, each call returns a new value."""
        try:
            return " ".join(f"{key} {handle.identity}" for key, handle in self.resolve({}).items())
        except NotFound:
            return f"at {time.monotonic_ns()}"

    def resolve(self, known: dict[Key, _Part]) -> dict[Key, _Part]:
        """Add the models of the ensemble and of nested ensembles to ``known``. Returns ``known``. Raises NotFound."""
        for key in self.ensemble.models.values():
            if key not in known:
                handle = known[key] = self._models.find(*key)
                if isinstance(handle.scheduler, EnsembleScheduler):
                    handle.scheduler.resolve(known)
        return known

    def _prepare(self, passing: Passing) -> None:
        request = passing.request
        try:
            owned = self.resolve({}) if request.held is None else {}
        except NotFound as error:
            message = f"in ensemble '{self.ensemble.name}', {error.message}"
            raise Unavailable(message, error.hint or "load it") from None
        for handle in owned.values():
            handle.hold()
        passing.request = msgspec.structs.replace(request, outputs=(), held=request.held or owned)
        passing.release = partial(_release, owned)
        plan = self.ensemble.graph.plan(request.outputs) if request.outputs else self._whole
        passing.run = PipelineRun(plan, partial(self._ask, passing), partial(self._ended, passing))

    def _ask(
        self, passing: Passing, step: PipelineStep, inputs: dict[str, Array], done: Callable[[Told], None]
    ) -> Cancellable | None:
        assert passing.request.held is not None
        handle: _Part = passing.request.held[self.ensemble.models[step.name]]
        ranks = {spec.name: len(spec.shape) for spec in handle.signature.inputs}
        request = msgspec.structs.replace(
            passing.request,
            model_name=handle.name,
            model_version=handle.version,
            inputs={name: _of_rank(array, ranks.get(name, array.ndim)) for name, array in inputs.items()},
            outputs=tuple(step.outputs),
            trace=None,
        )

        def answered(outcome: Outcome) -> None:
            done(outcome.outputs if isinstance(outcome, InferResponse) else outcome)

        return self._models.call(request, answered, handle)

    def _to_graph(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        reshapes = self.ensemble.reshapes
        return {
            name: array.reshape(reshapes[name].to_model(array.shape)) if name in reshapes else array
            for name, array in inputs.items()
        }

    def _to_client(self, told: Mapping[str, Array]) -> dict[str, Array]:
        return {name: self._shaped(name, array) for name, array in told.items()}

    def _shaped(self, name: str, array: Array) -> Array:
        array, reshape = _of_rank(array, self.ensemble.ranks[name]), self.ensemble.reshapes.get(name)
        return array if reshape is None else array.reshape(reshape.to_client(name, array.shape))


def _release(owned: Mapping[Key, EnsemblePart]) -> None:
    for handle in owned.values():
        handle.release()


def _of_rank(array: Array, rank: int) -> Array:
    """Add or remove a batch dimension of size one, if this gives ``array`` ``rank`` dimensions."""
    if array.ndim + 1 == rank:
        return array[None]
    if array.ndim - 1 == rank and array.shape[0] == 1:
        return array.reshape(array.shape[1:])
    return array
