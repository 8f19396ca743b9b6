from __future__ import annotations

import msgspec
import numpy as np
import pytest

from penstock.errors import InvalidInput
from penstock.pipeline.function import Function, ModelStep
from penstock.tensor import DataType, Signature, TensorSpec
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


def test_shapes_that_no_model_takes_are_refused_before_it(scores: Function) -> None:
    step = scores.work["linear"]
    assert isinstance(step, ModelStep)
    with pytest.raises(InvalidInput, match=r"the model's input 'x' has the shape \[3\], but the value has \[4\]"):
        step.to_model({"x": np.zeros(4, np.float32)})
    whole = msgspec.structs.replace(step, with_batch=frozenset())
    assert whole.to_model({"x": np.zeros((5, 3), np.float32)})["x"].shape == (5, 3)
    with pytest.raises(InvalidInput, match="the values have no rows"):
        whole.to_model({"x": np.zeros((0, 3), np.float32)})
    two = Signature((*LINEAR.inputs, TensorSpec("z", DataType.FP32, (-1, 3))), LINEAR.outputs)
    inputs = {name: np.zeros((rows, 3), np.float32) for name, rows in (("x", 2), ("z", 5))}
    with pytest.raises(InvalidInput, match=r"different numbers of rows: \[2, 5\]"):
        msgspec.structs.replace(whole, signature=two).to_model(inputs)
