"""Declarations of pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidConfig
from penstock.pipeline.condition import Condition
from penstock.pipeline.graph import Graph, PipelineStep, declare
from penstock.tensor import DataType, Signature, TensorSpec


def step(name: str, **more: Any) -> PipelineStep:
    """``a.b>c.d`` reads tensors a and b and produces c and d; its own names are i0, i1 … and o0, o1 …"""
    read, _, given = name.partition(">")
    inputs = {f"i{n}": tensor for n, tensor in enumerate(filter(None, read.split(".")))}
    outputs = {f"o{n}": tensor for n, tensor in enumerate(filter(None, given.split(".")))}
    if "condition" in more:
        more["condition"] = Condition.parse(more["condition"])
    return PipelineStep(**{"name": name, "inputs": inputs, "outputs": outputs} | more)


def spec(name: str, kind: str = "FP32", *shape: int) -> TensorSpec:
    return TensorSpec(name, DataType(kind), shape or (-1, 2))


def whole(inputs: str, outputs: str) -> Signature:
    return Signature(tuple(map(spec, inputs.split("."))), tuple(map(spec, outputs.split("."))))


def graph(inputs: str, outputs: str, *steps: str | PipelineStep, **more: Any) -> Graph:
    made = [step(one) if isinstance(one, str) else one for one in steps]
    return declare(whole(inputs, outputs), made, **more)


def names(steps: tuple[PipelineStep, ...]) -> list[str]:
    return [one.name for one in steps]


def test_steps_are_put_in_an_order_in_which_they_can_run() -> None:
    made = graph("x", "y", "b.c>y", "a>c", "a>b", "x>a")
    assert names(made.steps) == ["x>a", "a>c", "a>b", "b.c>y"]
    assert not made.warnings


def test_a_plan_tells_who_reads_what_and_how_often() -> None:
    plan = graph("x", "y.b", "x>a", "a>b", "a.b>y").plan(["y", "b"])
    assert plan.readers == {"x": [0], "a": [1, 2], "b": [2]}
    assert plan.uses == {"x": 1, "a": 2, "b": 2, "y": 1}


def test_a_plan_leaves_out_what_is_not_wanted() -> None:
    made = graph("x.u", "y.z", "x>a", "a>y", "a.u>z")
    assert names(made.plan(["y"]).steps) == ["x>a", "a>y"]
    assert made.plan(["y"]).uses == {"x": 1, "a": 1, "y": 1}


def test_an_input_may_be_an_output() -> None:
    assert graph("x", "x.y", "x>y").plan(["x", "y"]).uses == {"x": 2, "y": 1}


def test_what_is_not_used_is_told() -> None:
    made = graph("x.u", "y", "x>y.a")
    assert made.warnings == ("tensor 'u' is not used", "tensor 'a' is not used")


def test_one_tensor_may_be_several_inputs_of_a_step() -> None:
    assert graph("x", "y", "x.x>y").plan(["y"]).uses["x"] == 1


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            ["x>a", "aa>y"],
            "step 'aa>y' reads tensor 'aa', which no step produces (did you mean 'a'?)",
        ),
        (["x>a"], "no step produces output 'y'"),
        (["x>y", "x.x>y"], "tensor 'y' is produced by step 'x>y' and by step 'x.x>y'"),
        (["x>y", "y>x"], "output 'o0' of step 'y>x' is tensor 'x', which is an input"),
        (["x>y", "x>y"], "2 steps are called 'x>y'"),
        (["x.b>a", "a>b.y"], "steps wait for one another: 'a>b.y' -> 'x.b>a' -> 'a>b.y'"),
        (["x.a>a.y"], "steps wait for one another: 'x.a>a.y' -> 'x.a>a.y'"),
        (["x>a.y", "b>c", "c>d", "d>b"], "steps wait for one another: 'b>c' -> 'c>d' -> 'd>b' -> 'b>c'"),
        ([step("x>y", condition="t")], "step 'x>y' reads tensor 't', which no step produces"),
        (
            [step("x>y", condition="x"), step("x.x>y", condition="x > 1")],
            "tensor 'y' is produced by step 'x>y' and by step 'x.x>y'",
        ),
    ],
)
def test_what_cannot_run_is_refused(steps: list[str | PipelineStep], message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        graph("x", "y", *steps)
    assert message in str(caught.value)


def test_an_unknown_optional_output_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="optional output 'z' is not an output of the graph"):
        graph("x", "y", "x>y", optional=frozenset({"z"}))


def typed(
    shape: tuple[int, ...] = (-1, 2), kind: str = "FP32", *, batchable: bool = False, **more: Any
) -> PipelineStep:
    """A step from ``shape`` and ``kind`` to FP32 (-1, 2)."""
    signature = Signature((spec("i0", kind, *shape),), (spec("o0"),))
    return step("x>y", signature=signature, batchable=batchable, **more)


@pytest.mark.parametrize(
    ("one", "batchable"),
    [
        (typed(), False),
        (typed(batchable=True), True),
        (typed((4, -1)), False),
        (typed((-1, -1, 2), batchable=True), False),
        (typed((2,)), True),
    ],
    ids=["same", "batches", "free", "a batch of one", "one row"],
)
def test_tensors_that_fit(one: PipelineStep, batchable: bool) -> None:
    graph("x", "y", one, batchable=batchable)


@pytest.mark.parametrize(
    ("one", "batchable", "message"),
    [
        (
            typed(kind="INT8"),
            False,
            "tensor 'x' is FP32 [-1, 2] as an input, but INT8 [-1, 2] as input 'i0' of step 'x>y'",
        ),
        (typed((-1, 3)), False, "tensor 'x' is FP32 [-1, 2] as an input, but FP32 [-1, 3] as input 'i0' of step 'x>y'"),
        (typed((2,)), False, "but FP32 [2] as input"),
        (typed((-1, -1, 2), batchable=True), True, "but FP32 [-1, -1, 2] as input"),
        (typed(inputs={}), False, "input 'i0' of step 'x>y' has no tensor"),
        (typed(inputs={"i0": "x", "i1": "x"}), False, "step 'x>y' has no input 'i1' (use one of: i0)"),
        (typed(outputs={"p": "y"}), False, "step 'x>y' has no output 'p'"),
        (typed(condition="x"), False, "'x != 0' of step 'x>y' needs one number, but the tensor is FP32"),
    ],
)
def test_tensors_that_do_not_fit(one: PipelineStep, batchable: bool, message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        graph("x", "y", one, batchable=batchable)
    assert message in str(caught.value)


def test_what_is_given_must_fit_the_outputs() -> None:
    signature = Signature((spec("x"),), (spec("y", "FP32", -1, 7),))
    with pytest.raises(
        InvalidConfig,
        match=r"tensor 'y' is FP32 \[-1, 2\] as output 'o0' of step 'x>y', but FP32 \[-1, 7\] as an output",
    ):
        declare(signature, [typed()])


def test_an_input_that_a_step_can_do_without_need_not_be_given() -> None:
    graph("x.z", "y", typed(inputs={}, optional=frozenset({"i0"})))
