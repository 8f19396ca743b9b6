"""Random functions over integers, for the tests of the executor: their steps, their models, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.pipeline.condition import Condition
from penstock.pipeline.function import Function, MapStep, ModelStep
from penstock.pipeline.graph import PipelineStep, declare
from penstock.pipeline.steps.base import Step
from penstock.pipeline.streaming.models import LocalModel
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array, DataType, Signature, TensorSpec

ROWS = Signature((TensorSpec("x", DataType.INT64, (-1, 1)),), (TensorSpec("y", DataType.INT64, (-1, 1)),))
VALUE = ValueType(datatype=DataType.INT64, shape=(1,))
BAD = 13
"""Steps reject numbers that leave this remainder when divided by 17."""


def number(value: int) -> Array:
    return np.array([value % 1000])


def refuse_bad(value: int) -> None:
    if value % 17 == BAD:
        raise InvalidInput(f"{value} is bad")


class Plain(Step, frozen=True, kw_only=True):
    """The weighted sum of the inputs plus ``salt``."""

    salt: int

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        raise NotImplementedError

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        total = sum((n + 1) * int(inputs[name][0]) for n, name in enumerate(sorted(inputs))) + self.salt
        refuse_bad(total)
        return {"y": number(total)}


class Vectorised(Plain, frozen=True, kw_only=True):
    """The same for many items at once."""

    def run_many(self, items: Sequence[Mapping[str, Value]]) -> list[dict[str, Value]]:
        return [self.run(item) for item in items]


class Spread(Plain, frozen=True, kw_only=True):
    """A list of zero to three numbers."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        first = int(inputs["x0"][0])
        return {"y": [number(first + n + self.salt) for n in range(first % 4)]}


class Gather(Plain, frozen=True, kw_only=True):
    """The sum of a list."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        return {"y": number(sum(int(one[0]) for one in inputs["x0"]) + self.salt)}


def forward(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The model: three times x. It rejects a call with a bad row."""
    for row in inputs["x"]:
        refuse_bad(int(row[0]))
    return {"y": inputs["x"] * 3 % 1000}


MODEL = ModelStep("model", ROWS, batchable=True, max_batch=4, with_batch=frozenset("xy"))
MODELS = {"model": LocalModel(forward, max_batch=4)}


class Wiring(msgspec.Struct):
    """A function being drawn."""

    steps: list[PipelineStep] = []
    work: dict[str, Any] = {}

    def add(self, work: Any, reads: list[str], own: Sequence[str] = (), condition: str = "") -> str:
        name = f"s{len(self.steps)}"
        inputs = dict(zip(own or [f"x{n}" for n in range(len(reads))], reads, strict=True))
        when = Condition.parse(condition) if condition else None
        self.steps.append(PipelineStep(name, inputs, {"y": name}, when))
        self.work[name] = work
        return name


def function_of(wiring: Wiring, *chain: Any) -> Function:
    """A function that runs ``chain``, one step after the other."""
    last = "x"
    for work in chain:
        last = wiring.add(work, [last], ["x"] if isinstance(work, ModelStep) else [])
    return finished(wiring, {last: "y"})


def finished(wiring: Wiring, outputs: Mapping[str, str], optional: frozenset[str] = frozenset()) -> Function:
    """The function whose ``outputs`` are those of steps, by their new names."""
    steps = [_renamed(step, outputs) for step in wiring.steps]
    specs = tuple(TensorSpec(name, DataType.INT64, (1,)) for name in outputs.values())
    signature = Signature((TensorSpec("x", DataType.INT64, (1,)),), specs)
    graph = declare(signature, steps, optional=optional)
    return Function("random", {"x": VALUE}, {spec.name: VALUE for spec in specs}, graph, wiring.work)


def _renamed(step: PipelineStep, names: Mapping[str, str]) -> PipelineStep:
    condition = step.condition
    if condition is not None and condition.tensor in names:
        condition = Condition(names[condition.tensor], condition.comparison, condition.bound)
    inputs = {own: names.get(value, value) for own, value in step.inputs.items()}
    outputs = {own: names.get(value, value) for own, value in step.outputs.items()}
    return msgspec.structs.replace(step, inputs=inputs, outputs=outputs, condition=condition)


@st.composite
def functions(draw: st.DrawFn, depth: int = 1) -> Function:
    """A function of ``x``, with the output ``y`` of its last step and perhaps an optional output."""
    wiring, known = Wiring(), ["x"]
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["plain", "vectorised", "model", "map"][: 4 if depth else 3]))
        salt = draw(st.integers(0, 50))
        first = draw(st.sampled_from(known))
        if kind == "model":
            known.append(wiring.add(MODEL, [first], ["x"]))
        elif kind == "map":
            spread = wiring.add(Spread(salt=salt), [first])
            texts = wiring.add(MapStep("x", "x", draw(functions(depth=depth - 1))), [spread], ["x"])
            known.append(wiring.add(Gather(salt=salt), [texts]))
        else:
            reads = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
            known.append(wiring.add((Plain if kind == "plain" else Vectorised)(salt=salt), reads))
    outputs, optional = {known[-1]: "y"}, frozenset[str]()
    if depth and draw(st.booleans()):
        branch = wiring.add(Plain(salt=1), [draw(st.sampled_from(known))], condition=f"{known[-1]} >= 500")
        outputs, optional = {**outputs, branch: "z"}, frozenset("z")
    return finished(wiring, outputs, optional)


def expected(function: Function, x: Array, outputs: Sequence[str] = ()) -> dict[str, int] | None:
    """What ``function`` computes for ``x``, or only these ``outputs``; None if a step that they need rejects a value."""
    wanted = outputs or function.graph.outputs
    try:
        values = _evaluated(function, x, wanted)
    except InvalidInput:
        return None
    return {name: int(values[name][0]) for name in wanted if name in values}


def _evaluated(function: Function, x: Array, wanted: Sequence[str]) -> dict[str, Value]:
    values: dict[str, Value] = {"x": x}
    for step in function.graph.plan(wanted).steps:
        if step.condition is not None and not step.condition.holds(values[step.condition.tensor]):
            continue
        work, inputs = function.work[step.name], {own: values[name] for own, name in step.inputs.items()}
        (target,) = step.outputs.values()
        if isinstance(work, MapStep):
            values[target] = [_evaluated(work.inner, element, ["y"])["y"] for element in inputs["x"]]
        elif isinstance(work, ModelStep):
            values[target] = forward({"x": inputs["x"][None]})["y"][0]
        else:
            values[target] = work.run(inputs)["y"]
    return values
