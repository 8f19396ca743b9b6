"""Find outputs that may be absent when a pipeline is packed, by trying each way in which its conditions can turn out.

A step is skipped if its condition does not hold, or if a value that it needs is absent. So an output may be absent because of a
condition far before its own step, and is always present if two steps with opposite conditions produce it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from penstock.pipeline.condition import Condition
from penstock.pipeline.declaration import Declaration, all_steps
from penstock.pipeline.function import Function, MapStep
from penstock.pipeline.graph import GraphPlan, PipelineStep
from penstock.pipeline.source import Path
from penstock.pipeline.steps.constant import Constant
from penstock.pipeline.value import ValueType

MAX_CASES = 4_096
"""Number of cases up to which the conditions before an output are tried. With more, its absence is an error when the item runs."""


class Absence(msgspec.Struct, frozen=True):
    """A case in which an output is absent."""

    output: str
    skipped: tuple[PipelineStep, ...]
    """The steps before the output whose conditions do not hold."""
    numbers: Mapping[str, float]
    """Values by name with which this happens."""


def check_presence(declaration: Declaration, function: Function) -> None:
    """Raises InvalidConfig for an output that may be absent and is not declared as optional."""
    for absence in absences(function):
        hint = f"list it under 'optional', or add a step that produces '{absence.output}' in the other case"
        raise declaration.error(("outputs",), _message(absence), hint)
    paths = {step.name: step.path for step in all_steps(declaration.steps)}
    for name, path, inner in _maps(function, paths):
        for absence in absences(inner):
            hint = (
                f"the list needs one '{absence.output}' for each element: add a step that produces it in the other case"
            )
            raise declaration.error(path, f"step '{name}': {_message(absence)}", hint)


def absences(function: Function) -> Iterator[Absence]:
    """One case for each required output that may be absent."""
    for output in function.outputs:
        if output not in function.graph.optional:
            plan = function.graph.plan((output,))
            found = [case for numbers in _cases(function, plan) if (case := _absence(plan, numbers))]
            if found:
                yield min(found, key=lambda case: len(case.skipped))


def _maps(function: Function, paths: Mapping[str, Path]) -> Iterator[tuple[str, Path, Function]]:
    for name, work in function.work.items():
        if isinstance(work, MapStep):
            yield name, paths[name], work.inner
            yield from _maps(work.inner, paths)


def _message(absence: Absence) -> str:
    why = " and ".join(f"step '{step.name}' needs '{step.condition}'" for step in absence.skipped)
    numbers = ", ".join(f"{name} = {number:g}" for name, number in absence.numbers.items())
    return f"the output '{absence.output}' is absent if {numbers}: {why}"


def _cases(function: Function, plan: GraphPlan) -> Iterator[dict[str, float]]:
    """Numbers for the values that the conditions of ``plan`` read, one case for each combination of outcomes."""
    conditions: dict[str, list[Condition]] = {}
    for step in plan.steps:
        if step.condition is not None:
            conditions.setdefault(step.condition.tensor, []).append(step.condition)
    constants = _constants(function, plan)
    numbers = [
        [constants[name]] if name in constants else _numbers(function.types[name], given)
        for name, given in conditions.items()
    ]
    if math.prod(map(len, numbers)) <= MAX_CASES:
        for case in itertools.product(*numbers):
            yield dict(zip(conditions, case, strict=True))


def _constants(function: Function, plan: GraphPlan) -> dict[str, float]:
    """The constants that are one number."""
    found: dict[str, float] = {}
    for step in plan.steps:
        work = function.work.get(step.name)
        if isinstance(work, Constant) and np.size(value := work.run({})["value"]) == 1 and not isinstance(value, str):
            found |= {name: float(np.reshape(value, ())) for name in step.outputs.values()}
    return found


def _numbers(kind: ValueType, conditions: list[Condition]) -> list[float]:
    """Numbers of the type ``kind``, one for each combination of outcomes of ``conditions``, except NaN."""
    bounds = sorted({condition.bound for condition in conditions})
    if kind.datatype.is_float:
        least, most = bounds[0], bounds[-1]
        between = [one / 2 + two / 2 for one, two in itertools.pairwise(bounds)]
        numbers = {0.0, *bounds, *between, least - abs(least) - 1, most + abs(most) + 1}
    else:
        whole = {end for bound in bounds for end in (math.floor(bound), math.ceil(bound))}
        numbers = {float(end + step) for end in whole for step in (-1, 0, 1)}
    match kind.datatype.dtype.kind:
        case "b":
            numbers = {0.0, 1.0}
        case "u":
            numbers = {one for one in numbers if one >= 0}
    outcomes: dict[tuple[bool, ...], float] = {}
    for one in sorted(
        numbers, key=lambda one: (one not in bounds, abs(one), one)
    ):  # bounds and small numbers read best
        outcomes.setdefault(tuple(condition.holds(one) for condition in conditions), one)
    return list(outcomes.values())


def _absence(plan: GraphPlan, numbers: Mapping[str, float]) -> Absence | None:
    """The absence of the only output of ``plan``; None if ``numbers`` let it be present."""
    present, skipped = set(plan.inputs), list[PipelineStep]()
    for step in plan.steps:
        needed = {value for own, value in step.inputs.items() if own not in step.optional}
        condition = step.condition
        if not needed <= present or (condition is not None and condition.tensor not in present):
            continue
        if condition is None or condition.holds(numbers[condition.tensor]):
            present.update(step.outputs.values())
        else:
            skipped.append(step)
    if present.issuperset(plan.wanted):
        return None
    shown = {step.condition.tensor: numbers[step.condition.tensor] for step in skipped if step.condition}
    return Absence(plan.wanted[0], tuple(skipped), shown)
