"""Softmax and sigmoid against PyTorch."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.errors import InvalidConfig
from penstock.pipeline.steps import kernels
from penstock.pipeline.steps.scores.activations import Sigmoid, Softmax, sigmoid, softmax
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


def exact_softmax(logits: np.ndarray, axis: int = -1) -> np.ndarray:
    """The definition, in FP64."""
    with np.errstate(invalid="ignore"):
        found: np.ndarray = np.exp(logits.astype(float) - logits.max(axis, keepdims=True))
    found /= found.sum(axis, keepdims=True)
    return found


def rows(count: int, length: int, seed: int, special: bool) -> np.ndarray:
    """Logits, whose differences are exact in FP32, with unusual numbers at any place."""
    rng = np.random.default_rng(seed)
    found = (rng.normal(scale=rng.choice([0.1, 2, 40]), size=(count, length)) * 1024).round() / 1024
    if special:
        unusual = [np.nan, np.inf, -np.inf, -3e38, 3e38, -95, -100, -104, 1e-40]
        found[rng.random(found.shape) < rng.choice([0.005, 0.2, 1])] = rng.choice(unusual)
    return found.astype(np.float32)


_SHAPES = st.tuples(st.integers(1, 6), st.one_of(st.integers(1, 90), st.integers(1000, 1040)))


@pytest.mark.filterwarnings("error")
@settings(deadline=None, max_examples=500)
@given(_SHAPES, st.integers(0, 9999), st.booleans(), st.sampled_from(["C", "F", "strided", "locked"]))
def test_softmax_of_rows_is_its_definition(shape: tuple[int, int], seed: int, special: bool, layout: str) -> None:
    logits = rows(*shape, seed, special)
    given = {"F": logits.T.copy().T, "strided": np.repeat(logits, 2, 1)[:, ::2]}.get(layout, logits)
    given.flags.writeable = layout != "locked"
    found = softmax(given)
    with np.errstate(over="ignore"):
        wanted = exact_softmax(logits)
    # A difference that is not exact has an error of 2^-24 of it, which is that of the exponential.
    np.testing.assert_allclose(found, wanted, rtol=1.2e-6 if not special else 1e-5, atol=1e-44)
    assert (found == 0).tolist() == (wanted.astype(np.float32) == 0).tolist() or (wanted[found == 0] < 3e-45).all()
    for row, one in zip(given, softmax(logits), strict=True):  # alone, a row has the same bits
        np.testing.assert_array_equal(softmax(row[None])[0], one)


@settings(deadline=None, max_examples=100)
@given(arrays.array_shapes(min_dims=2, max_dims=4, max_side=9), st.integers(0, 999), st.data())
def test_softmax_along_any_axis(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    logits = np.random.default_rng(seed).normal(size=shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    for dtype, error in ((np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2), (np.float32, 1e-6), (np.float64, 1e-14)):
        given = logits.astype(dtype)
        found = softmax(given, axis)
        assert found.dtype == given.dtype
        np.testing.assert_allclose(found.astype(float), exact_softmax(given.astype(float), axis), rtol=error)


def test_softmax_where_the_operator_loses_small_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors without AVX-512."""

    def flushed(logits: np.ndarray) -> np.ndarray:
        found = exact_softmax(logits).astype(np.float32)
        found[found < 2e-38] = 0
        return found

    monkeypatch.setattr(kernels, "softmax", flushed)
    monkeypatch.setattr(kernels, "keep_subnormals", lambda: False)
    logits = np.array([[0, 1, 2], [0, -95, 1], [np.nan, 0, 1], [0, -np.inf, 1]], np.float32)
    with np.errstate(invalid="ignore"):
        found = softmax(logits)
    np.testing.assert_allclose(found, exact_softmax(logits), rtol=1e-3)
    assert 0 < found[1, 1] < 1e-38
    assert found[3, 1] == 0


@pytest.mark.parametrize("operator", ["softmax", "exp"])
def test_an_operator_that_loses_nan_is_not_used(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = getattr(kernels, operator)
    monkeypatch.setattr(kernels, operator, lambda numbers: lost(np.nan_to_num(numbers)))
    kernels.keep_nan.cache_clear()
    try:
        assert not kernels.keep_nan()
        many = np.zeros((200, 100), np.float32)
        many[7, 70] = np.nan
        assert np.isnan(softmax(many)).sum() == 100
        assert np.isnan(sigmoid(many)).sum() == 1
    finally:
        kernels.keep_nan.cache_clear()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1, 7, 100, 15_999, 16_000, 16_077, 50_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sigmoid_is_exact_for_any_logit(count: int, dtype: type) -> None:
    logits: np.ndarray = np.random.default_rng(count).uniform(-87, 100, (1, count)).astype(dtype)
    with np.errstate(over="ignore"):
        wanted = 1 / (1 + np.exp(-logits.astype(np.longdouble)))
    for view in (logits, logits.T, logits.reshape(-1), np.repeat(logits, 2, 1)[:, ::2]):
        found = sigmoid(view)
        assert found.shape == view.shape
        np.testing.assert_allclose(
            found.reshape(1, -1), wanted.astype(float), rtol=3e-7 if dtype is np.float32 else 1e-15
        )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [6, 20_000])
def test_sigmoid_of_many_with_extremes(count: int) -> None:
    logits = np.tile(np.array([np.nan, -np.inf, np.inf, -95, 3e38, -3e38], np.float32), count // 6 + 1)
    found = sigmoid(logits)
    wanted = np.tile(np.array([np.nan, 0, 1, 5.52e-42, 1, 0], np.float32), count // 6 + 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


def test_softmax_needs_its_axis() -> None:
    with pytest.raises(InvalidConfig, match="needs an array with axis 1 as 'value'"):
        Softmax(axis=1).check({"value": ValueType(shape=(3,))})
    assert Softmax(axis=0).run({"value": np.zeros((2, 3), np.float32)})["value"].tolist() == [[0.5] * 3] * 2


def test_text_has_no_softmax() -> None:
    with pytest.raises(InvalidConfig, match="softmax"):
        Softmax().check({"value": TEXT})
    assert Softmax().check({"value": ValueType(shape=(3,))})["value"].shape == (3,)
