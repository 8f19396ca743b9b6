from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidArgument, InvalidConfig
from penstock.pipeline.condition import Condition
from penstock.pipeline.direct import Direct
from penstock.pipeline.presence import absences, check_presence
from pipelines import SCORES, declared, function

NUMBERS = {"a": {"shape": []}, "b": {"shape": []}, "n": {"datatype": "INT64", "shape": []}}


def pipeline(steps: list[dict[str, Any]], outputs: list[str], **more: Any) -> dict[str, Any]:
    """Keys of a declaration whose steps are softmax of a vector ``x``."""
    used = {Condition.parse(step["when"]).tensor for step in _flat(steps) if step.get("when")}
    inputs = {"x": {"shape": [3]}, **{name: given for name, given in NUMBERS.items() if name in used}}
    return {"inputs": inputs, "models": None, "labels": None, "examples": None} | {
        "steps": steps,
        "outputs": outputs,
        **more,
    }


def _flat(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [inner for step in steps for inner in [step, *_flat(step.get("steps", []))]]


def soft(source: str, out: str, when: str = "") -> dict[str, Any]:
    return {"step": "softmax", "in": source, "out": out} | ({"when": when} if when else {})


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([soft("x", "y", "a >= 0.5")], r"the output 'y' is absent if a = [-.\d]+: step 'softmax' needs 'a >= 0.5'"),
        ([soft("x", "w", "a > 0"), soft("w", "v"), soft("v", "y")], "step 'softmax' needs 'a > 0'"),
        (
            [soft("x", "y", "n > 0"), soft("x", "y", "n == 0")],
            "if n = -1: step 'softmax' needs 'n > 0' and step 'softmax-2' needs 'n == 0'",
        ),
        ([soft("x", "w", "a > 0"), soft("w", "y", "b > 0"), soft("x", "y", "b <= 0")], "'a > 0'"),
        ([soft("x", "y", "a > 1"), soft("x", "y", "a < 1")], "if a = 1:"),
    ],
)
def test_an_output_that_may_be_absent_is_an_error(steps: list[dict[str, Any]], message: str) -> None:
    changes = pipeline(steps, ["y"])
    with pytest.raises(InvalidConfig, match=message) as raised:
        check_presence(declared(SCORES, **changes), function(**changes))
    assert "list it under 'optional'" in raised.value.hint
    optional = {**changes, "optional": ["y"]}
    check_presence(declared(SCORES, **optional), function(**optional))


@pytest.mark.parametrize(
    "steps",
    [
        [soft("x", "y", "a > 0"), soft("x", "y", "a <= 0")],
        [soft("x", "y", "a"), soft("x", "y", "not a")],
        [soft("x", "y", "n >= 1"), soft("x", "y", "n <= 0")],  # no whole number lies between
        [soft("x", "w", "a > 0"), soft("w", "y", "a > 0"), soft("x", "y", "a <= 0")],
    ],
)
def test_an_output_of_steps_with_opposite_conditions_is_always_present(steps: list[dict[str, Any]]) -> None:
    assert not list(absences(function(**pipeline(steps, ["y"]))))


def test_a_constant_decides_a_condition() -> None:
    for flag, found in ((1, 0), (0, 1)):
        steps = [soft("x", "y", "flag > 0")]
        assert len(list(absences(function(**pipeline(steps, ["y"], constants={"flag": flag}))))) == found


def test_each_element_of_a_list_needs_a_result() -> None:
    steps: list[dict[str, Any]] = [
        {"step": "crop_boxes", "in": {"image": "pixels", "boxes": "boxes"}, "out": "crops"},
        {
            "map": "crops",
            "as": "crop",
            "out": "small",
            "steps": [{"step": "resize", "in": "crop", "out": "small", "size": [4, 4], "when": "a > 0"}],
        },
    ]
    inputs = {
        "pixels": {"datatype": "UINT8", "shape": [-1, -1, 3]},
        "boxes": {"shape": [-1, 4]},
        "a": {"shape": []},
    }
    changes = pipeline(steps, ["small"]) | {"inputs": inputs}
    with pytest.raises(InvalidConfig, match=r"step 'crops': the output 'small' is absent if a = .*'a > 0'") as raised:
        check_presence(declared(SCORES, **changes), function(**changes))
    assert "one 'small' for each element" in raised.value.hint


def random_steps(rng: random.Random) -> list[dict[str, Any]]:
    """Steps in a row, each of which reads an earlier value, some under a condition, and some with its opposite beside them."""
    known, steps = ["x"], list[dict[str, Any]]()
    for number in range(rng.randint(1, 5)):
        name, on = f"v{number}", rng.choice(["a", "b", "n"])
        kind = rng.randrange(3)
        if kind == 0:
            steps.append(soft(rng.choice(known), name))
        else:
            bound = rng.choice([0, 0.5, 1])
            steps.append(soft(rng.choice(known), name, f"{on} > {bound}"))
            if kind == 2:
                steps.append(soft(rng.choice(known), name, f"{on} {rng.choice(['<=', '<'])} {bound}"))
        known.append(name)
    return steps


@pytest.mark.parametrize("seed", range(60))
def test_the_finding_is_that_of_running_the_pipeline(seed: int) -> None:
    """Generated pipelines run on a grid of numbers, of which every case of the conditions has one."""
    rng = random.Random(seed)
    steps = random_steps(rng)
    output = steps[-1]["out"]
    needed, kept = {output}, list[dict[str, Any]]()
    for step in reversed(steps):
        if step["out"] in needed:
            kept.insert(0, step)
            needed.add(step["in"])
    made = function(**pipeline(kept, [output]))
    runs, grid, failures = Direct(made, {}), (-1, 0, 0.25, 0.5, 0.75, 1, 2), 0
    names = [name for name in made.inputs if name != "x"]
    for case in np.stack(np.meshgrid(*[grid] * len(names)), -1).reshape(-1, len(names)) if names else [()]:
        numbers = {
            name: np.asarray(one, np.int64 if name == "n" else np.float32)
            for name, one in zip(names, case, strict=True)
        }
        try:
            runs.call({"x": np.ones(3, np.float32), **numbers})
        except InvalidArgument:
            failures += 1
    assert bool(failures) == bool(list(absences(made)))


def test_many_conditions_are_left_to_the_run() -> None:
    """Beyond ``MAX_CASES`` combinations nothing is claimed, so packing stays fast; up to there, the absence is found."""
    for count, found in ((12, 1), (13, 0)):
        names = [f"c{number}" for number in range(count)]
        values = ["x", *(f"v{number}" for number in range(count))]
        steps = [soft(values[n], values[n + 1], f"{name} > 0") for n, name in enumerate(names)]
        inputs = {"x": {"shape": [3]}, **{name: {"shape": []} for name in names}}
        changes = pipeline([soft("x", "y")], [values[-1]]) | {"inputs": inputs, "steps": steps}
        assert len(list(absences(function(**changes)))) == found
