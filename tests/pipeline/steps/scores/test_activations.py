"""Softmax and sigmoid against PyTorch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.errors import InvalidConfig
from penstock.pipeline.steps.scores.activations import Sigmoid, Softmax
from penstock.pipeline.value import TEXT, ValueType

_LOGITS = arrays.arrays(np.float32, arrays.array_shapes(max_dims=3), elements=st.floats(-200, 200, width=32))


@given(_LOGITS)
def test_softmax_equals_torch(logits: np.ndarray) -> None:
    found = Softmax().run({"value": logits})["value"]
    np.testing.assert_allclose(found, torch.softmax(torch.from_numpy(logits), -1).numpy(), atol=1e-6)


@given(_LOGITS)
def test_sigmoid_equals_torch(logits: np.ndarray) -> None:
    found = Sigmoid().run({"value": logits})["value"]
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, torch.sigmoid(torch.from_numpy(logits)).numpy(), atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_sigmoid_of_extreme_logits(dtype: type) -> None:
    logits = np.array([-np.inf, -1000, -10, 0, 1000, np.inf, np.nan], dtype)
    found = Sigmoid().run({"value": logits})["value"]
    assert found.dtype == dtype
    np.testing.assert_allclose(found, np.array([0, 0, 4.5398e-05, 0.5, 1, 1, np.nan], dtype), rtol=1e-3)


@pytest.mark.parametrize("axis", [1, -2])
def test_softmax_needs_its_axis(axis: int) -> None:
    with pytest.raises(InvalidConfig, match=f"an array with axis {axis} as 'value', but it is tensor FP32"):
        Softmax(axis=axis).check({"value": ValueType(shape=(3,))})


def test_infinite_logits_have_no_probabilities() -> None:
    assert np.isnan(Softmax().run({"value": np.float32([0, np.inf])})["value"][1])


def test_text_has_no_softmax() -> None:
    with pytest.raises(InvalidConfig, match="softmax"):
        Softmax().check({"value": TEXT})
    assert Softmax().check({"value": ValueType(shape=(3,))})["value"].shape == (3,)
