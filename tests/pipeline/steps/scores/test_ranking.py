"""Top-k, threshold and argmax against PyTorch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import StepResources
from penstock.pipeline.steps.scores.ranking import Argmax, Label, Threshold, TopK
from penstock.pipeline.value import TEXT, ValueType
from penstock.tensor import Array, DataType

DIGITS = StepResources(labels={"digits": tuple("0123456789")})
_SCORES = arrays.arrays(
    st.sampled_from([np.float32, np.float64, np.int8, np.uint8]),
    st.integers(0, 30) | st.integers(257, 300),  # small arrays are sorted, large ones searched
    elements=st.integers(0, 5),  # so that many are equal
)


@given(_SCORES, st.integers(1, 40))
def test_top_k_is_a_stable_order(scores: Array, k: int) -> None:
    found = TopK(k=k).run({"value": scores})
    wanted = sorted(range(scores.size), key=lambda index: (-int(scores[index]), index))[:k]
    assert found["indices"].tolist() == wanted
    assert found["labels"] == [str(index) for index in wanted]
    assert found["scores"].tolist() == scores[wanted].tolist()
    top = torch.topk(torch.from_numpy(scores), min(k, scores.size)).values
    assert found["scores"].tolist() == top.tolist()


@given(_SCORES, st.integers(-1, 6))
def test_threshold_takes_the_same_classes(scores: Array, at: int) -> None:
    found = Threshold(at=at).run({"value": scores})
    assert sorted(found["indices"].tolist()) == [index for index, score in enumerate(scores) if score >= at]
    assert found["scores"].tolist() == sorted(found["scores"].tolist(), reverse=True)


def test_infinite_scores_have_an_order() -> None:
    scores = np.array([-np.inf, 1, np.inf, -np.inf], np.float32)
    assert TopK(k=4).run({"value": scores})["indices"].tolist() == [2, 1, 0, 3]
    scores = np.full(300, -np.inf, np.float32)
    scores[[7, 250]] = 1, np.inf
    for k in (1, 4, 20, 400):
        wanted = [250, 7, *(index for index in range(300) if index not in (7, 250))][:k]
        assert TopK(k=k).run({"value": scores})["indices"].tolist() == wanted


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_becomes_fp32(dtype: Any) -> None:
    found = TopK(k=2).run({"value": np.array([1, 3, 2], dtype)})
    assert found["scores"].dtype == np.float32
    assert found["indices"].tolist() == [1, 2]
    given = ValueType(datatype=DataType.from_numpy(np.dtype(dtype)), shape=(3,))
    assert TopK(k=2).check({"value": given})["scores"] == ValueType(datatype=DataType.FP32, shape=(2,))


@pytest.mark.parametrize("step", [TopK(), Threshold(at=0), Argmax()])
def test_nan_is_an_error(step: TopK) -> None:
    with pytest.raises(InvalidInput, match="'value' contains NaN"):
        step.run({"value": np.array([1, np.nan, 2], np.float32)})


def test_labels() -> None:
    scores = np.eye(10, dtype=np.float32)[7].reshape(10, 1, 1)
    for step in (TopK(labels="digits").bound(DIGITS), TopK(labels=tuple("0123456789"))):
        assert step.run({"value": scores})["labels"] == ["7"]
    with pytest.raises(InvalidConfig, match="no labels 'digit'.*did you mean 'digits'"):
        TopK(labels="digit").bound(DIGITS)
    step = TopK(labels="digits").bound(DIGITS)
    with pytest.raises(InvalidConfig, match="10 labels, but the model has 11 classes"):
        step.check({"value": ValueType(shape=(11,))})
    with pytest.raises(InvalidInput, match="11 scores for 10 labels"):
        step.run({"value": np.zeros(11, np.float32)})
    assert step.check({"value": ValueType(shape=(1, -1))})["scores"].shape == (-1,)


def test_scores_have_one_dimension() -> None:
    with pytest.raises(
        InvalidConfig, match=r"step 'top_k' needs an array of scores \[classes\] as 'value', but it is text"
    ):
        TopK().check({"value": TEXT})
    with pytest.raises(InvalidConfig, match="needs an array of scores"):
        TopK().check({"value": ValueType(shape=(2, 3))})
    with pytest.raises(InvalidInput, match=r"shape \[2, 3\]"):
        TopK().run({"value": np.zeros((2, 3), np.float32)})
    with pytest.raises(InvalidConfig, match="not a finite number"):
        Threshold(at=float("nan"))


@given(arrays.arrays(np.float32, arrays.array_shapes(max_dims=3), elements=st.integers(0, 3)), st.data())
def test_argmax_equals_torch(scores: Array, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-scores.ndim, scores.ndim - 1))
    found = Argmax(axis=axis).run({"value": scores})["value"]
    np.testing.assert_array_equal(found, torch.from_numpy(scores).argmax(axis).numpy())
    kind = Argmax(axis=axis).check({"value": ValueType(shape=scores.shape)})["value"]
    assert (kind.shape, kind.datatype.dtype) == (found.shape, found.dtype)


def test_argmax_needs_its_axis() -> None:
    with pytest.raises(InvalidConfig, match="an array with axis 2"):
        Argmax(axis=2).check({"value": ValueType(shape=(2, 3))})
    with pytest.raises(InvalidInput, match="no classes"):
        Argmax().run({"value": np.zeros((2, 0), np.float32)})


def test_classes_get_their_names() -> None:
    step = Label(labels="digits").bound(DIGITS)
    assert step.run({"classes": np.array([3, 0, 3])})["labels"] == ["3", "0", "3"]
    assert step.run({"classes": np.zeros(0, np.int64)})["labels"] == []
    assert step.run({"classes": np.array(3)})["labels"] == "3"
    for wrong in (10, -1):
        with pytest.raises(InvalidInput, match=f"no label for class {wrong}: 'labels' has 10 names"):
            step.run({"classes": np.array([1, wrong])})
    with pytest.raises(InvalidConfig, match="INT64"):
        step.check({"classes": ValueType(shape=(3,))})
    assert step.check({"classes": ValueType(datatype=DataType.INT64, shape=(-1,))})["labels"].many
