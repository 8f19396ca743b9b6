"""Runs one item in the calling thread, without queues: the shortest way for a single call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from penstock.errors import Cancelled, PenstockError, prefixed
from penstock.pipeline.executor import wanted_of
from penstock.pipeline.function import Function, MapStep, ModelStep, Work
from penstock.pipeline.graph import PipelineStep
from penstock.pipeline.streaming.fusing import fused
from penstock.pipeline.streaming.models import LocalModel
from penstock.pipeline.value import Value

_log = logging.getLogger(__name__)
_Run = Callable[[dict[str, Value]], Mapping[str, Value]]


class Direct:
    """A function whose models are in this process. The steps run in order, with the outcome of ``executor.PipelineRun``.

    Safe to use from several threads, if calls of the models are.
    """

    def __init__(self, function: Function, models: Mapping[str, LocalModel], outputs: Sequence[str] = ()) -> None:
        """``outputs`` are the wanted outputs; by default all."""
        self.function = function
        wanted = tuple(outputs or function.graph.outputs)
        function = fused(function, wanted)
        self._plan = function.graph.plan(wanted)
        self._work = [
            (step, _bound(function.work[step.name], step, models), released)
            for step, released in zip(self._plan.steps, self._plan.releases, strict=True)
        ]

    def call(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The outputs for one item. Raises PenstockError."""
        values = dict(inputs)
        for step, run, released in self._work:
            taken = _taken(step, values)
            for tensor in released:
                values.pop(tensor, None)
            if taken is None:
                continue
            told = _ran(step, run, taken)
            for own, tensor in step.outputs.items():
                if own not in told:
                    raise PenstockError(f"step '{step.name}' returned no output '{own}'")
                values[tensor] = told[own]
        return wanted_of(self._plan, values)


def _taken(step: PipelineStep, values: Mapping[str, Value]) -> dict[str, Value] | None:
    try:
        return step.take(values)
    except PenstockError as error:
        raise prefixed(f"step '{step.name}': ", error) from None


def _ran(step: PipelineStep, run: _Run, inputs: dict[str, Value]) -> Mapping[str, Value]:
    try:
        return run(inputs)
    except PenstockError as error:
        raise prefixed(f"step '{step.name}': ", error) from None
    except Exception:  # noqa: BLE001 - a bug in a step is logged, and not shown to the caller
        _log.exception("step '%s' failed", step.name)
        raise PenstockError("internal error") from None


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
        for number, element in enumerate(inputs[work.over]):
            try:
                results.append(inner.call({**inputs, work.as_: element}))
            except Cancelled:
                raise
            except PenstockError as error:
                raise prefixed(f"element {number}: ", error) from error
        return {name: [result[name] for result in results] for name in outputs}

    return run
