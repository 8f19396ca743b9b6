"""Binds the steps of a function to stages: which code runs a step, and which of its calls run together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from penstock.errors import PenstockError
from penstock.pipeline.executor import Told
from penstock.pipeline.function import Function, MapStep, ModelStep
from penstock.pipeline.graph import Graph, GraphPlan
from penstock.pipeline.python_step import PythonStep
from penstock.pipeline.steps.base import Step
from penstock.pipeline.streaming.batch_size import BatchSize
from penstock.pipeline.streaming.fusing import fused
from penstock.pipeline.streaming.models import LocalModel, ModelCaller, attempted, guarded, run_rows, shapes_of
from penstock.pipeline.streaming.stage import Inputs, StageSpec, one_group

Models = Mapping[str, LocalModel | ModelCaller]
_VECTORISED = 32
"""Maximum number of calls that a vectorised step runs together."""


class Remote(msgspec.Struct, frozen=True, eq=False):
    """A step whose model runs elsewhere."""

    path: str
    step: ModelStep
    caller: ModelCaller


class BoundFunction(msgspec.Struct, frozen=True, eq=False):
    """A function whose steps are bound to stages: a step's part is the name of its stage, a remote model, or the inner scope of a
    ``map``."""

    graph: Graph
    plan: GraphPlan
    """The steps that all outputs need."""
    parts: Mapping[str, str | Remote | BoundFunction]
    over: str = ""
    each: str = ""
    """The list that a ``map`` reads, and the name of its elements."""


class Bound(msgspec.Struct, frozen=True, eq=False):
    """A function whose steps are bound."""

    scope: BoundFunction
    stages: Mapping[str, StageSpec]
    """The stages by path, in topological order."""


def bind(function: Function, models: Models, outputs: Sequence[str] = ()) -> Bound:
    """Bind the steps that ``outputs`` need; by default all outputs. ``models`` must have all models of the function."""
    models = {name: guarded(model) if isinstance(model, LocalModel) else model for name, model in models.items()}
    stages: dict[str, StageSpec] = {}
    return Bound(_scope(function, models, "", outputs or function.graph.outputs, stages), stages)


def _scope(
    function: Function, models: Models, path: str, outputs: Sequence[str], stages: dict[str, StageSpec]
) -> BoundFunction:
    parts: dict[str, str | Remote | BoundFunction] = {}
    function = fused(function, outputs)
    plan = function.graph.plan(outputs)
    for step in plan.steps:
        work, name = function.work[step.name], path + step.name
        if isinstance(work, MapStep):
            inner = _scope(work.inner, models, f"{name}/", tuple(step.outputs), stages)
            parts[step.name] = msgspec.structs.replace(inner, over=work.over, each=work.as_)
            continue
        model = models[work.model] if isinstance(work, ModelStep) else None
        if isinstance(work, ModelStep) and model is not None and not isinstance(model, LocalModel):
            parts[step.name] = Remote(name, work, model)
            continue
        parts[step.name] = name
        if isinstance(work, ModelStep):
            assert isinstance(model, LocalModel)
            stages[name] = _model_stage(name, work, model)
        else:
            stages[name] = _stage(name, work)
    return BoundFunction(function.graph, plan, parts)


def _model_stage(name: str, step: ModelStep, model: LocalModel) -> StageSpec:
    size = min(model.max_batch, step.max_batch) if step.batchable else 1
    run = partial(run_rows, step, model)
    learnt = None if model.is_tuned or size == 1 else BatchSize(run, size)
    return StageSpec(
        name,
        learnt or run,
        partial(shapes_of, step) if size > 1 else one_group,
        max_batch=size,
        waits=size > 1,
        size=None if learnt is None else learnt.rows,
        limit=model.calls,
    )


def _stage(name: str, step: Step | PythonStep) -> StageSpec:
    is_vectorised = isinstance(step, Step) and type(step).run_many is not Step.run_many
    movable = step if isinstance(step, PythonStep) or step.holds_lock else None
    run = partial(run_step, step)
    return StageSpec(name, run, max_batch=_VECTORISED if is_vectorised else 1, movable=movable)


def run_step(step: Step | PythonStep, items: Sequence[Inputs]) -> list[Told]:
    """The outcomes of ``step`` for ``items``."""
    if isinstance(step, Step) and len(items) > 1:
        with suppress(PenstockError):
            return [*step.run_many(items)]
    return [attempted(step.run, item) for item in items]  # so that only the items that the step rejects fail
