"""Softmax and sigmoid against PyTorch."""

import ml_dtypes
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (70_000,), (3, 1000)])
def test_every_datatype_equals_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    logits: torch.Tensor = torch.from_numpy(np.random.default_rng(0).normal(scale=4, size=shape)).to(dtype)
    given = from_torch(logits)
    for step, reference in ((Softmax(), torch.softmax(logits, -1)), (Sigmoid(), torch.sigmoid(logits))):
        found, wanted = step.run({"value": given})["value"], from_torch(reference)
        assert found.dtype == given.dtype
        unit = torch.finfo(dtype).eps
        np.testing.assert_allclose(found.astype(float), wanted.astype(float), rtol=128 * unit if unit < 1e-4 else unit)


_EXTREMES = [
    [np.inf, 0, 1],
    [np.inf, np.inf, -1],
    [-np.inf, 0, 1],
    [-np.inf] * 3,
    [np.nan, 1, 2],
    [1000, -1000, 0],
    [3e38, -3e38, 1e38],
    [-3e38, -2e38, -1e38],
    [0, -104, -87],
    [0, 0, 0],
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_extreme_logits_equal_torch_without_a_warning(dtype: torch.dtype) -> None:
    rows = torch.tensor(_EXTREMES, dtype=torch.float64).clamp(-6e4, 6e4) if dtype is torch.float16 else None
    logits = (torch.tensor(_EXTREMES, dtype=torch.float64) if rows is None else rows).to(dtype)
    for one in (logits, logits.T.contiguous().T, *logits):
        for step, reference in ((Softmax(), torch.softmax(one, -1)), (Sigmoid(), torch.sigmoid(one))):
            found = step.run({"value": from_torch(one)})["value"]
            np.testing.assert_allclose(found.astype(float), from_torch(reference).astype(float), rtol=1e-2, atol=1e-30)


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    """``tensor`` as an array, which torch cannot make of BF16."""
    found: np.ndarray = (
        tensor.contiguous().view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    )
    return found.view(ml_dtypes.bfloat16) if tensor.dtype is torch.bfloat16 else found


def test_softmax_needs_its_axis() -> None:
    with pytest.raises(InvalidConfig, match="needs an array with axis 1 as 'value'"):
        Softmax(axis=1).check({"value": ValueType(shape=(3,))})
    assert Softmax(axis=0).run({"value": np.zeros((2, 3), np.float32)})["value"].tolist() == [[0.5] * 3] * 2


def test_text_has_no_softmax() -> None:
    with pytest.raises(InvalidConfig, match="softmax"):
        Softmax().check({"value": TEXT})
    assert Softmax().check({"value": ValueType(shape=(3,))})["value"].shape == (3,)
