"""The scheduler of a pipeline: it passes each request through the steps of the pipeline's function.

Steps that transform values run on a few threads. Steps that run a model send a request to the model's scheduler, which merges it with
those of other requests::

    event loop                                 threads of the pipeline
    submit ── Line.begin ────────────────────▶ decode, resize … (one after the other, without the event loop)
    DataPlane.call, the model's scheduler ◀─── model step
              └── outcome ───────────────────▶ softmax, top_k …
    answer ◀────────────────────────────────── outputs
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from penstock.errors import Cancelled
from penstock.online.daemon import on_daemon_thread
from penstock.online.scheduler.base import Cancellable
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.ensemble import EnsemblePart
from penstock.online.scheduler.graph import GraphScheduler, Passing
from penstock.pipeline.executor import Told, Work
from penstock.pipeline.function import Function
from penstock.pipeline.streaming.binding import bind
from penstock.pipeline.streaming.fairness import Item
from penstock.pipeline.streaming.line import Line
from penstock.pipeline.value import Value
from penstock.pipeline.wire import to_tensors, to_values
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.resources import usable_cores
from penstock.telemetry.statistics import ModelStatistics
from penstock.telemetry.tracing import Tracer
from penstock.tensor import Array

_SAMPLE, _ELEMENT_BYTES = 64, 64
Submit = Callable[[InferRequest, Done, Any], Cancellable | None]
"""Submits a request to a model, on the event loop."""


class PipelineScheduler(GraphScheduler):
    """The ``Scheduler`` that the module's docstring describes. ``parts`` are the handles of the function's models, by name.

    At most ``max_inside`` requests are in progress. The others wait with their encoded inputs, so that decoded pictures take a bounded
    amount of memory. Clients share the threads fairly: a request of a client that has received less work goes first.
    """

    def __init__(  # noqa: PLR0913 - collaborators and a keyword-only limit
        self,
        function: Function,
        parts: Mapping[str, EnsemblePart],
        submit: Submit,
        config: BatchingConfig,
        loop: asyncio.AbstractEventLoop,
        statistics: ModelStatistics,
        tracer: Tracer | None = None,
        *,
        max_bytes: int | None = None,
    ) -> None:
        cores = usable_cores()
        most = 2 * (cores + sum(part.scheduler.config.max_batch for part in parts.values()))
        line = Line(
            bind(function, {name: _Caller(self, part) for name, part in parts.items()}), cores, max_bytes=max_bytes
        )
        super().__init__(f"pipeline '{statistics.name}'", most, config, loop, statistics, tracer, line.flows)
        self.function = function
        self._submit = submit
        self._parts = parts
        self._requests: dict[int, InferRequest] = {}
        """The requests in progress, by number. Their steps' requests have the same client, deadline and priority."""
        self._line = line
        self._is_started = False

    @property
    def is_healthy(self) -> bool:
        """True if all models of the pipeline can run."""
        return all(part.is_healthy for part in self._parts.values())

    async def drain(self) -> None:
        """Wait until every request has ended, then end the threads."""
        await super().drain()
        if self._is_started:
            await on_daemon_thread("close-pipeline", self._line.close)

    def on_loop(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` on the event loop. May be called from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    def ask(self, item: int, part: EnsemblePart, inputs: dict[str, Array], done: Done) -> Cancellable | None:
        """Submit a model step of request ``item``, on the event loop."""
        if (request := self._requests.get(item)) is None:
            return None  # the request has ended
        asked = msgspec.structs.replace(
            request, model_name=part.name, model_version=part.version, inputs=inputs, outputs=(), trace=None, lease=None
        )
        return self._submit(asked, done, part)

    def _prepare(self, passing: Passing) -> None:
        number = passing.number
        self._requests[number] = msgspec.structs.replace(passing.request, inputs={}, parameters={})
        outputs = passing.request.outputs
        # The run leaves out optional outputs that are absent.
        passing.request = msgspec.structs.replace(passing.request, outputs=())
        passing.run = _Item(
            self._line, passing.item, outputs, lambda told: self.on_loop(partial(self._ended, passing, told))
        )
        passing.release = partial(self._requests.pop, number, None)
        if not self._is_started:
            self._is_started = True
            self._line.start()

    def _size(self, values: Mapping[str, Value]) -> int:
        return sum(map(_size, values.values()))

    def _to_graph(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return to_values(self.function, inputs)

    def _to_client(self, told: Mapping[str, Array]) -> dict[str, Array]:
        return to_tensors(self.function, told)


def _size(value: Value) -> int:
    """The approximate bytes of ``value``."""
    if isinstance(value, np.ndarray):
        if not value.dtype.hasobject:
            return value.nbytes
        value = value.reshape(-1)
    if isinstance(value, np.ndarray | list):
        some = [_size(one) for one in value[:_SAMPLE]]
        return sum(some) * len(value) // max(1, len(some)) + _ELEMENT_BYTES * len(value)
    return len(value) if hasattr(value, "__len__") else _ELEMENT_BYTES


class _Item:
    """One request on the line."""

    def __init__(self, line: Line, item: Item, outputs: tuple[str, ...], done: Callable[[Told], None]) -> None:
        self._line = line
        self._item = item
        self._outputs = outputs
        self._done = done
        self._is_begun = self._is_over = False

    def begin(self, inputs: Mapping[str, Array]) -> None:
        if not self._is_over:
            self._is_begun = True
            self._line.begin(self._item, inputs, self._done, self._outputs)

    def cancel(self) -> None:
        if self._is_begun:
            self._line.cancel(self._item.number)
        elif not self._is_over:
            self._is_over = True
            self._done(Cancelled("the request was cancelled"))


class _Caller:
    """A model of the pipeline as a ``ModelCaller``. Called by the pipeline's threads."""

    def __init__(self, scheduler: PipelineScheduler, part: EnsemblePart) -> None:
        self._scheduler = scheduler
        self._part = part

    def start(self, item: int, inputs: dict[str, Array], done: Callable[[Told], None]) -> Work:
        work = _Asked(self._scheduler, done)
        self._scheduler.on_loop(partial(work.submit, item, self._part, inputs))
        return work


class _Asked:
    """A request to a model. Only ``cancel`` is called outside of the event loop."""

    def __init__(self, scheduler: PipelineScheduler, done: Callable[[Told], None]) -> None:
        self._scheduler = scheduler
        self._done = done
        self._pending: Cancellable | None = None
        self._is_cancelled = False

    def submit(self, item: int, part: EnsemblePart, inputs: dict[str, Array]) -> None:
        if not self._is_cancelled:
            self._pending = self._scheduler.ask(item, part, inputs, self._answered)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._scheduler.on_loop(self._cancel)

    def _cancel(self) -> None:
        if self._pending is not None:
            self._pending.cancel()

    def _answered(self, outcome: Outcome) -> None:
        self._pending = None
        if not self._is_cancelled:
            self._done(outcome.outputs if isinstance(outcome, InferResponse) else outcome)
