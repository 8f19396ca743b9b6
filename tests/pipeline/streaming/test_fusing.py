from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.pipeline.direct import Direct
from penstock.pipeline.function import Function
from penstock.pipeline.golden import observed
from penstock.pipeline.streaming.fusing import fused
from penstock.pipeline.streaming.stages import Stages
from pipelines import FEATURES, LOCAL, function

PICTURE = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
STEPS: list[dict[str, Any]] = [
    {"step": "decode_image", "in": "image", "out": "pixels"},
    {"step": "resize", "in": "pixels", "out": "small", "size": [8, 6]},
    {"step": "normalise", "in": "small", "out": "scaled", "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]},
    {"step": "layout", "in": "scaled", "out": "planes", "order": "chw"},
]


def picture(outputs: list[str], steps: list[dict[str, Any]] = STEPS) -> Function:
    given = {"labels": None, "models": None, "examples": None}
    return function(inputs={"image": {"media": "image"}}, steps=steps, outputs=outputs, **given)


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (["planes"], ["decode_image", "resize+normalise+layout"]),
        (["planes", "scaled"], ["decode_image", "resize+normalise", "layout"]),
        (["planes", "small"], ["decode_image", "resize", "normalise+layout"]),
    ],
)
def test_chains_are_joined_with_the_same_result_to_the_bit(outputs: list[str], names: list[str]) -> None:
    found = picture(outputs)
    assert [step.name for step in fused(found, outputs).graph.steps] == names
    every = Direct(observed(found), {}).call({"image": PICTURE})
    for answer in (Direct(found, {}).call({"image": PICTURE}), Stages(found, {}).call({"image": PICTURE})):
        assert list(answer) == outputs
        for name in outputs:
            assert every[name].dtype == answer[name].dtype
            np.testing.assert_array_equal(every[name], answer[name])


def test_a_value_that_two_steps_read_is_kept() -> None:
    steps = [*STEPS, {"step": "normalise", "in": "small", "out": "other"}]
    found = picture(["planes", "other"], steps)
    assert [step.name for step in fused(found, ["planes", "other"]).graph.steps][1] == "resize"
    assert Direct(found, {}).call({"image": PICTURE}).keys() == {"planes", "other"}


def test_other_pipelines_are_left_alone() -> None:
    found = function()
    assert fused(found, ["p"]) is found
    single = picture(["pixels", "small"], STEPS[:2])
    assert fused(single, ["pixels", "small"]) is single
    assert Direct(found, LOCAL).call({"features": FEATURES}).keys() == {"label", "p"}
