from __future__ import annotations

import numpy as np
import pytest

from penstock.pipeline.function import Function, ModelStep
from pipelines import FEATURES, LINEAR, function


@pytest.fixture
def scores() -> Function:
    return function()


def test_the_plan_is_made_once(scores: Function) -> None:
    assert scores.plan is scores.plan
    assert scores.plan.wanted == ("label", "p")


def test_values_of_an_item_have_no_batch_axis(scores: Function) -> None:
    step = scores.work["linear"]
    assert isinstance(step, ModelStep)
    assert (step.signature, step.batchable, step.max_batch) == (LINEAR, True, 8)
    tensors = step.to_model({"x": FEATURES})
    assert tensors["x"].shape == (1, 3)
    np.testing.assert_array_equal(step.from_model({"y": tensors["x"]})["y"], FEATURES)
