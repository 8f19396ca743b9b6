"""Names of classes, and checks of scores."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import StepResources
from penstock.pipeline.steps.scores.labels import (
    check_labels,
    class_count,
    comparable,
    names_of,
    score_type,
    scores_of,
)
from penstock.pipeline.steps.scores.ranking import Label, TopK
from penstock.pipeline.value import TEXT, ValueType
from penstock.tensor import DataType

LISTS = StepResources(labels={"coco": ("cat", "dog")})


def test_labels_are_a_list_or_the_name_of_one() -> None:
    assert TopK(labels="coco").bound(LISTS).labels == ("cat", "dog")
    assert TopK(labels=("a", "b")).bound(LISTS).labels == ("a", "b")
    assert TopK().bound(LISTS).labels == ()
    with pytest.raises(InvalidConfig, match="there are no labels 'cocoa'") as caught:
        Label(labels="cocoa").bound(LISTS)
    assert "coco" in caught.value.hint


def test_classes_without_labels_have_numbers() -> None:
    assert names_of(np.array([1, 0]), ("cat", "dog")) == ["dog", "cat"]
    assert names_of(np.array([1, 0]), ()) == ["1", "0"]


def test_the_number_of_labels_must_fit() -> None:
    check_labels("top_k", ("a", "b"), 2)
    check_labels("top_k", ("a", "b"), -1)
    check_labels("top_k", (), 3)
    with pytest.raises(InvalidConfig, match="step 'top_k' has 2 labels, but the model has 3 classes"):
        check_labels("top_k", ("a", "b"), 3)


@pytest.mark.parametrize(("shape", "count"), [((5,), 5), ((1, 5), 5), ((5, 1, 1), 5), ((-1,), -1), ((1, 1), 1)])
def test_classes_are_counted(shape: tuple[int, ...], count: int) -> None:
    assert class_count("top_k", ValueType(shape=shape)) == count


@pytest.mark.parametrize("given", [ValueType(shape=(2, 3)), ValueType(), ValueType(shape=(3,), many=True), TEXT])
def test_other_values_are_no_scores(given: ValueType) -> None:
    with pytest.raises(InvalidConfig, match=r"an array of scores \[classes\]"):
        class_count("top_k", given)


def test_scores_have_one_dimension_and_no_nan() -> None:
    assert scores_of(np.array([[1.0], [2.0]])).tolist() == [1, 2]
    with pytest.raises(InvalidInput, match=r"the shape \[2, 2\], not \[classes\]"):
        scores_of(np.zeros((2, 2)))
    with pytest.raises(InvalidInput, match="3 scores for 2 labels"):
        scores_of(np.zeros(3), ("a", "b"))
    with pytest.raises(InvalidInput, match="'value' contains NaN"):
        scores_of(np.array([0, np.nan]))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_widened(dtype: type) -> None:
    found = comparable(np.array([1.5, 2], dtype))
    assert found.dtype == np.float32
    assert found.tolist() == [1.5, 2]


def test_the_type_of_scores() -> None:
    assert score_type(DataType.BF16, [2]) == ValueType(datatype=DataType.FP32, shape=(2,))
    assert score_type(DataType.INT8, (2,)) == ValueType(datatype=DataType.INT8, shape=(2,))
