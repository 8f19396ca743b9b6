"""The form of boxes."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.boxes.arrays import boxes_of, check_array, corners, matrix_of
from penstock.pipeline.value import TEXT, ValueType
from penstock.tensor import DataType


def test_types() -> None:
    given = ValueType(datatype=DataType.FP16, shape=(7, 4))
    assert check_array("nms", "boxes", {"boxes": given}, (-1, 4)) is given
    for other in (TEXT, ValueType(shape=(7, 5)), ValueType(datatype=DataType.INT64, shape=(7, 4))):
        with pytest.raises(InvalidConfig, match=r"needs floating-point numbers \[n, 4\] or \[n, 4, 2\] as 'boxes'"):
            check_array("nms", "boxes", {"boxes": other}, (-1, 4), (-1, 4, 2))


def test_boxes_are_finite_and_have_their_shape() -> None:
    assert boxes_of(np.zeros((2, 4), np.float16)).dtype == np.float32
    assert boxes_of(np.zeros((2, 4, 2)), quads=True).shape == (2, 4, 2)
    with pytest.raises(InvalidInput, match=r"the shape \[2, 4, 2\], not \[n, 4\]$"):
        boxes_of(np.zeros((2, 4, 2)))
    with pytest.raises(InvalidInput, match=r"not \[n, 4\] or \[n, 4, 2\]"):
        boxes_of(np.zeros((2, 3)), quads=True)
    for wrong in (np.nan, np.inf):
        with pytest.raises(InvalidInput, match="NaN or infinity"):
            boxes_of(np.full((1, 4), wrong))


def test_matrices() -> None:
    assert matrix_of(np.zeros((2, 5)), "scores").dtype == np.float32
    with pytest.raises(InvalidInput, match=r"'scores' has the shape \[5\], not two dimensions"):
        matrix_of(np.zeros(5), "scores")
    with pytest.raises(InvalidInput, match="'scores' contains NaN"):
        matrix_of(np.full((1, 1), np.nan), "scores")


def test_corners() -> None:
    assert corners(np.array([[10, 20, 4, 6]])).tolist() == [[8, 17, 12, 23]]
