"""The scheduler of an ensemble: it has no instances, and passes each request from model to model.

Every step is a request to its own model's scheduler, where it is merged with those of other requests, from whatever ensemble or
client they come. What the models are is settled when the request comes, and kept loaded until it has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.errors import Cancelled, DeadlineExceeded, NotFound, PenstockError, Unavailable, revive
from penstock.online.scheduler.answers import Answers
from penstock.online.scheduler.base import Cancellable
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.layout import Reshape
from penstock.online.scheduler.queue import Pending
from penstock.pipeline.executor import Run, Told
from penstock.pipeline.graph import Graph, Plan, Step
from penstock.request import Done, InferRequest, InferResponse
from penstock.telemetry.statistics import BatchTimes, Failure, ModelStatistics, Reason
from penstock.telemetry.tracing import Tracer
from penstock.tensor import Array

if TYPE_CHECKING:
    from penstock.online.repository.handle import Handle

Held = dict[tuple[str, str], "Handle"]
"""By name and version, the latter empty where the server chooses, the models that a request is passed to."""


class Call(Protocol):
    """``DataPlane.call``."""

    def __call__(self, request: InferRequest, done: Done, handle: Handle | None = None) -> Cancellable | None: ...


class Models(msgspec.Struct, frozen=True):
    """What an ensemble knows of the models around it."""

    find: Callable[[str, str], Handle]
    """The handle of a name and version, the latter empty for the server's choice. Raises NotFound."""
    call: Call


class Part(msgspec.Struct, frozen=True):
    """What a step asks."""

    key: tuple[str, str]
    """As in ``Held``."""
    outputs: tuple[str, ...]
    """Those asked for, in the model's order; empty for all."""
    ranks: Mapping[str, int]
    """By input of the model, the number of its dimensions, with that of the batch."""


class Ensemble(msgspec.Struct, frozen=True):
    """An ensemble as it is configured and checked."""

    name: str
    graph: Graph
    parts: Mapping[str, Part]
    """By name of the step."""
    ranks: Mapping[str, int]
    """By output of the ensemble, the number of its dimensions, with that of the batch."""
    reshapes: Mapping[str, Reshape]
    """By input and output of the ensemble, where its parts see another shape than its clients."""
    max_inside: int = 0
    """Most requests that are passed on and not yet answered; further ones wait. 0: no limit."""
    depth: int = 1
    """How many ensembles are inside one another, with this one."""


class _Passing(Pending, eq=False):
    """A request on its way through the ensemble; ``request`` is what those to the parts are made from."""

    plan: Plan | None = None
    inputs: dict[str, Array] = {}
    """Until it is passed on."""
    held: Held = {}
    owns_held: bool = False
    """Whether it is its own to release, and not that of an ensemble around this one."""
    run: Run | None = None
    started_ns: int = 0
    timer: asyncio.TimerHandle | None = None


class EnsembleScheduler:
    """See the module. Belongs to the event loop. Every request submitted ends exactly once, as of ``Scheduler``."""

    def __init__(
        self,
        ensemble: Ensemble,
        config: BatchingConfig,
        models: Models,
        loop: asyncio.AbstractEventLoop,
        statistics: ModelStatistics,
        tracer: Tracer | None = None,
    ) -> None:
        self.config = config
        self.ensemble = ensemble
        self._models = models
        self._loop = loop
        self._statistics = statistics
        self._answers = Answers(statistics, time.monotonic_ns, tracer)
        self._waiting: dict[_Passing, None] = {}
        """In the order of arrival."""
        self._inside = 0
        self._submitted = 0
        self._will_admit = False
        self._stopped = False

    @property
    def statistics(self) -> ModelStatistics:
        """Of the ensemble as a whole: what its requests wait for in its parts' queues counts as computing."""
        return self._answers.statistics

    @property
    def is_healthy(self) -> bool:
        """Whether all models that it needs are there and can run."""
        try:
            return all(handle.is_healthy for handle in self.resolve({}).values())
        except NotFound:
            return False

    @property
    def identity(self) -> str:
        """Names the content of all that a request is passed to; empty while something is missing."""
        try:
            parts = self.resolve({}).items()
        except NotFound:
            return ""
        return " ".join(f"{name} {version} {handle.identity}" for (name, version), handle in parts)

    def resolve(self, known: Held) -> Held:
        """``known``, with all models added that a request is passed to, those of ensembles among them too. Raises NotFound."""
        for part in self.ensemble.parts.values():
            if part.key not in known:
                handle = known[part.key] = self._models.find(*part.key)
                if isinstance(handle.scheduler, EnsembleScheduler):
                    handle.scheduler.resolve(known)
        return known

    def submit(self, request: InferRequest, rows: int, key: Hashable, done: Done) -> Cancellable:
        """As of ``Scheduler``. Raises Unavailable if the queue is full or stopped, or a model that it needs is not served."""
        name = self.ensemble.name
        if self._stopped:
            raise self._answers.refused(Unavailable(f"model '{name}' is being unloaded"))
        if self._statistics.pending >= self.config.max_queue:
            raise self._answers.refused(Unavailable(f"the queue of model '{name}' is full", "try again later"))
        owns_held = not isinstance(request.held, dict)
        held: Held = self._hold() if owns_held else request.held  # type: ignore[assignment]
        self._submitted += 1
        graph, now_ns = self.ensemble.graph, time.monotonic_ns()
        passed = msgspec.structs.replace(request, inputs={}, outputs=(), held=held)
        passing = _Passing(
            self,
            self._submitted,
            passed,
            rows,
            key,
            done,
            now_ns,
            plan=graph.plan(request.outputs) if request.outputs else graph.whole,
            inputs=request.inputs,
            held=held,
            owns_held=owns_held,
        )
        self._statistics.pending += 1
        self._waiting[passing] = None
        if request.deadline is not None and self.ensemble.max_inside:  # else its parts mind it
            passing.timer = self._loop.call_later(max(0.0, request.deadline.at - now_ns / 1e9), self._expire, passing)
        self._admit_soon()
        return passing

    def cancel(self, pending: Pending) -> None:
        """See ``Pending.cancel``."""
        assert isinstance(pending, _Passing)
        if pending.run is not None:
            pending.run.cancel()
        else:
            self._ended(pending, Cancelled("the request was cancelled"))

    async def drain(self) -> None:
        """Return when every request submitted has been answered."""
        await self._answers.drain()

    def stop(self) -> None:
        """Take no more requests."""
        self._stopped = True

    def _hold(self) -> Held:
        """All models that a request is passed to, kept loaded."""
        try:
            held = self.resolve({})
        except NotFound as error:
            message = f"in ensemble '{self.ensemble.name}', {error.message}"
            raise self._answers.refused(Unavailable(message, error.hint or "load it")) from None
        for handle in held.values():
            handle.hold()
        return held

    def _admit_soon(self) -> None:
        if not self._will_admit:
            self._will_admit = True
            self._loop.call_soon(self._admit)

    def _admit(self) -> None:
        """Pass on what may be passed on, in the order of arrival."""
        self._will_admit = False
        most = self.ensemble.max_inside
        while self._waiting and (not most or self._inside < most):
            passing = next(iter(self._waiting))
            del self._waiting[passing]
            self._begin(passing)

    def _begin(self, passing: _Passing) -> None:
        assert passing.plan is not None
        self._inside += 1
        passing.started_ns = time.monotonic_ns()
        inputs, passing.inputs = passing.inputs, {}
        for name, reshape in self.ensemble.reshapes.items():
            if name in inputs:
                inputs = {**inputs, name: inputs[name].reshape(reshape.to_model(inputs[name].shape))}
        passing.run = Run(passing.plan, partial(self._ask, passing), partial(self._ended, passing))
        passing.run.begin(inputs)

    def _ask(
        self, passing: _Passing, step: Step, inputs: dict[str, Array], done: Callable[[Told], None]
    ) -> Cancellable | None:
        part = self.ensemble.parts[step.name]
        handle = passing.held[part.key]
        request = msgspec.structs.replace(
            passing.request,
            model_name=handle.name,
            model_version=handle.version,
            inputs={name: _of_rank(array, part.ranks[name]) for name, array in inputs.items()},
            outputs=part.outputs,
            trace=None,
        )
        return self._models.call(
            request, lambda outcome: done(outcome.outputs if isinstance(outcome, InferResponse) else outcome), handle
        )

    def _expire(self, passing: _Passing) -> None:
        if passing in self._waiting:
            self._ended(passing, DeadlineExceeded("the request's deadline passed while it waited"))

    def _ended(self, passing: _Passing, told: Told) -> None:
        self._let_go(passing)
        if not isinstance(told, PenstockError):
            try:
                told = {name: self._shaped(name, array) for name, array in told.items()}
            except PenstockError as error:
                told = error
        if isinstance(told, PenstockError):
            self._answers.fail(passing, self._named(told), Failure.of(told))
            return
        started_ns, now_ns = passing.started_ns, time.monotonic_ns()
        times = BatchTimes(started_ns, started_ns, now_ns, now_ns)
        self._answers.give(Batch([passing], passing.rows, Reason.ALONE, started_ns), [told], times, now_ns)

    def _let_go(self, passing: _Passing) -> None:
        if passing.timer is not None:
            passing.timer.cancel()
        if passing in self._waiting:
            del self._waiting[passing]
        else:
            self._inside -= 1
        if passing.owns_held:
            for handle in passing.held.values():
                handle.release()
        passing.run, passing.held, passing.inputs = None, {}, {}
        if self._waiting:
            self._admit_soon()

    def _shaped(self, name: str, array: Array) -> Array:
        reshape = self.ensemble.reshapes.get(name)
        if reshape is not None:
            return array.reshape(reshape.to_client(name, array.shape))
        return _of_rank(array, self.ensemble.ranks[name])

    def _named(self, error: PenstockError) -> PenstockError:
        """``error``, and where it happened; of one that the client made there is nothing to say."""
        if isinstance(error, Cancelled):
            return error
        message = f"in ensemble '{self.ensemble.name}', {error.message}"
        named = revive(type(error).__name__, message, error.hint)
        named.retry_after_s = error.retry_after_s
        return named


def _of_rank(array: Array, rank: int) -> Array:
    """``array`` as a batch of one, or the one row of a batch without it, if that makes its number of dimensions ``rank``."""
    if array.ndim + 1 == rank:
        return array[None]
    if array.ndim - 1 == rank and array.shape[0] == 1:
        return array.reshape(array.shape[1:])
    return array
