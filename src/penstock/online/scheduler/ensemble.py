"""The scheduler of an ensemble. It has no instances, and passes each request from model to model.

Every step sends a request to the scheduler of the step's model. That scheduler may merge it with requests from other ensembles and
from clients. The models are looked up when a request to the ensemble arrives, and stay loaded until this request ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from penstock.errors import Cancelled, DeadlineExceeded, NotFound, PenstockError, Unavailable, prefixed
from penstock.online.scheduler.answers import Answers
from penstock.online.scheduler.base import Cancellable, Scheduler
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.layout import Reshape
from penstock.online.scheduler.queue import Pending
from penstock.pipeline.executor import PipelineRun, Told
from penstock.pipeline.graph import Graph, PipelineStep
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import BatchTimes, Failure, ModelStatistics, Reason
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


class _Passing(Pending, eq=False):
    """A request to the ensemble, and its progress. The requests to the models are created from ``request``."""

    run: PipelineRun | None = None
    owned: Mapping[Key, EnsemblePart] = {}
    """The models to release when the request ends; empty if an outer ensemble holds the models."""
    started_ns: int = 0
    timer: asyncio.TimerHandle | None = None
    """The timer that ends the request if its deadline passes while it waits."""


class EnsembleScheduler(Generic[_Part]):
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
        self.config = config
        self.ensemble = ensemble
        self._whole = ensemble.graph.plan(ensemble.graph.outputs)
        self._models = models
        self._loop = loop
        self._statistics = statistics
        self._answers = Answers(statistics, time.monotonic_ns, tracer)
        self._waiting: dict[_Passing, None] = {}
        """Waiting requests, in order of arrival."""
        self._inside = self._submitted = 0
        self._stopped = False

    @property
    def statistics(self) -> ModelStatistics:
        """The statistics of the whole ensemble. The time for which requests wait for the models counts as compute time."""
        return self._answers.statistics

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

    def submit(self, request: InferRequest, rows: int, key: Hashable, done: Done) -> Cancellable:
        """See ``Scheduler.submit``. Raises Unavailable if the queue is full or stopped, or a model is not served."""
        if self._stopped:
            raise self._answers.refused(Unavailable(f"model '{self.ensemble.name}' is being unloaded"))
        if self._statistics.pending >= self.config.max_queue:
            full = f"the queue of model '{self.ensemble.name}' is full"
            raise self._answers.refused(Unavailable(full, "try again later"))
        try:
            owned = self.resolve({}) if request.held is None else {}
        except NotFound as error:
            message = f"in ensemble '{self.ensemble.name}', {error.message}"
            raise self._answers.refused(Unavailable(message, error.hint or "load it")) from None
        for handle in owned.values():
            handle.hold()
        self._submitted, now_ns = self._submitted + 1, time.monotonic_ns()
        passed = msgspec.structs.replace(request, outputs=(), held=request.held or owned)
        passing = _Passing(self, self._submitted, passed, rows, key, done, now_ns, owned=owned)
        plan = self.ensemble.graph.plan(request.outputs) if request.outputs else self._whole
        passing.run = PipelineRun(plan, partial(self._ask, passing), partial(self._ended, passing))
        self._statistics.pending += 1
        self._waiting[passing] = None
        if request.deadline is not None and self.ensemble.max_inside:
            left_s = max(0.0, request.deadline.at - now_ns / 1e9)
            passing.timer = self._loop.call_later(left_s, self._expire, passing)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._admit)
        return passing

    def cancel(self, pending: Pending) -> None:
        """Cancel ``pending``, see ``Pending.cancel``."""
        if isinstance(pending, _Passing) and pending.run is not None:
            pending.run.cancel()

    def hurry(self) -> None:
        """Do nothing, because the requests wait in the queues of the ensemble's models."""

    async def drain(self) -> None:
        """Wait until every request has ended."""
        await self._answers.drain()

    def stop(self) -> None:
        """Refuse further requests."""
        self._stopped = True

    def _admit(self) -> None:
        """Start waiting requests, in order of arrival."""
        most = self.ensemble.max_inside
        while self._waiting and (not most or self._inside < most):
            passing = next(iter(self._waiting))
            del self._waiting[passing]
            self._inside += 1
            passing.started_ns = time.monotonic_ns()
            inputs, passing.request.inputs = passing.request.inputs, {}
            if passing.run is not None:
                passing.run.begin({name: self._to_parts(name, array) for name, array in inputs.items()})

    def _expire(self, passing: _Passing) -> None:
        if passing in self._waiting:
            self._ended(passing, DeadlineExceeded("the request's deadline passed while it waited"))

    def _ask(
        self, passing: _Passing, step: PipelineStep, inputs: dict[str, Array], done: Callable[[Told], None]
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

    def _ended(self, passing: _Passing, told: Told) -> None:
        if passing in self._waiting:
            del self._waiting[passing]
        else:
            self._inside -= 1
        if self._waiting:
            self._loop.call_soon(self._admit)
        if passing.timer is not None:
            passing.timer.cancel()
        for handle in passing.owned.values():
            handle.release()
        passing.run = None  # breaks the reference cycle
        if not isinstance(told, PenstockError):
            try:
                told = {name: self._to_client(name, array) for name, array in told.items()}
            except PenstockError as error:
                told = error
        if isinstance(told, PenstockError):
            named = told if isinstance(told, Cancelled) else prefixed(f"in ensemble '{self.ensemble.name}', ", told)
            self._answers.fail(passing, named, Failure.of(told))
            return
        started_ns, now_ns = passing.started_ns, time.monotonic_ns()
        times = BatchTimes(started_ns, started_ns, now_ns, now_ns)
        self._answers.give(Batch([passing], passing.rows, Reason.ALONE, started_ns), [told], times, now_ns)

    def _to_parts(self, name: str, array: Array) -> Array:
        reshape = self.ensemble.reshapes.get(name)
        return array if reshape is None else array.reshape(reshape.to_model(array.shape))

    def _to_client(self, name: str, array: Array) -> Array:
        array, reshape = _of_rank(array, self.ensemble.ranks[name]), self.ensemble.reshapes.get(name)
        return array if reshape is None else array.reshape(reshape.to_client(name, array.shape))


def _of_rank(array: Array, rank: int) -> Array:
    """Add or remove a batch dimension of size one, if this gives ``array`` ``rank`` dimensions."""
    if array.ndim + 1 == rank:
        return array[None]
    if array.ndim - 1 == rank and array.shape[0] == 1:
        return array.reshape(array.shape[1:])
    return array
