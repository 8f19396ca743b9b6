"""Runs one item in the calling thread, without queues: the shortest way for a single call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.errors import Cancelled, PenstockError, prefixed
from penstock.pipeline.executor import PipelineRun, Told
from penstock.pipeline.function import Function, MapStep, ModelStep, Work
from penstock.pipeline.graph import PipelineStep
from penstock.pipeline.streaming.fusing import fused
from penstock.pipeline.streaming.models import LocalModel
from penstock.pipeline.value import Value

_Run = Callable[[dict[str, Value]], Mapping[str, Value]]


class Direct:
    """A function whose models are in this process. Safe to use from several threads, if calls of the models are."""

    def __init__(self, function: Function, models: Mapping[str, LocalModel], outputs: Sequence[str] = ()) -> None:
        """``outputs`` are the wanted outputs; by default all."""
        self.function = function
        wanted = tuple(outputs or function.graph.outputs)
        function = fused(function, wanted)
        self._plan = function.graph.plan(wanted)
        self._runs = {step.name: _bound(function.work[step.name], step, models) for step in self._plan.steps}

    def call(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The outputs for one item. Raises PenstockError."""
        told: list[Told] = []
        PipelineRun(self._plan, self._start, told.append).begin(inputs)
        if isinstance(told[0], PenstockError):
            raise told[0]
        return dict(told[0])

    def _start(self, step: PipelineStep, inputs: dict[str, Value], done: Callable[[Told], None]) -> None:
        done(self._runs[step.name](inputs))


def _bound(work: Work, step: PipelineStep, models: Mapping[str, LocalModel]) -> _Run:
    """The code that runs ``work``."""
    if isinstance(work, ModelStep):
        forward, to_model, from_model = models[work.model].forward, work.to_model, work.from_model
        return lambda inputs: from_model(forward(to_model(inputs)))
    if isinstance(work, MapStep):
        return _mapped(work, Direct(work.inner, models, tuple(step.outputs)), tuple(step.outputs))
    return work.run


def _mapped(work: MapStep, inner: Direct, outputs: Sequence[str]) -> _Run:
    def run(inputs: dict[str, Value]) -> dict[str, Value]:
        results = []
        for number, element in enumerate(inputs.pop(work.over)):
            try:
                results.append(inner.call({**inputs, work.as_: element}))
            except Cancelled:
                raise
            except PenstockError as error:
                raise prefixed(f"element {number}: ", error) from error
        return {name: [result[name] for result in results] for name in outputs}

    return run
