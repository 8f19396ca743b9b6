from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from one_node import Const, agree, floats

_X = floats(3, 4, 5)
_INT = (TensorProto.INT64,)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("indices", [1, [0, -1], [[0, 2], [1, -2]]], ids=str)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_gather(axis: int, indices: object, dtype: type) -> None:
    agree("Gather", _X, Const(indices, dtype), axis=axis)


def test_gather_of_shapes() -> None:
    agree("Gather", np.array([7, 8, 9], np.int64), Const(-1), kinds=_INT)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements(axis: int) -> None:
    agree("GatherElements", _X, Const(np.random.default_rng(0).integers(-3, 3, (3, 4, 5))), axis=axis)


@pytest.mark.parametrize(
    ("batch", "shape"), [(0, (2, 1)), (0, (2, 2)), (0, (2, 3)), (1, (3, 1)), (1, (3, 2, 2)), (2, (3, 4, 1))]
)
def test_gather_nd(batch: int, shape: tuple[int, ...]) -> None:
    agree("GatherND", _X, Const(np.random.default_rng(0).integers(-3, 3, shape)), batch_dims=batch)


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatter_nd(reduction: str) -> None:
    agree("ScatterND", _X, Const([[0, 1], [2, -1]]), floats(2, 5, seed=1), reduction=reduction)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_one_hot(axis: int) -> None:
    agree("OneHot", np.array([0, 2, -1, 7, -9], np.int64), Const(4), Const([0.5, 2.0], np.float32), axis=axis)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_top_k(largest: int, axis: int) -> None:
    ties = np.random.default_rng(0).integers(0, 3, (3, 6)).astype(np.float32)
    agree("TopK", ties, Const([2]), axis=axis, largest=largest, kinds=(TensorProto.FLOAT, TensorProto.INT64))


def test_top_k_before_it_had_an_input() -> None:
    agree("TopK", _X, k=2, axis=1, opset=9, kinds=(TensorProto.FLOAT, TensorProto.INT64))


def test_non_zero() -> None:
    agree("NonZero", np.array([[0, 1, 0], [2, 0, 3]], np.float32), kinds=_INT)


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_cum_sum(exclusive: int, reverse: int, axis: int) -> None:
    agree("CumSum", _X, Const(axis), exclusive=exclusive, reverse=reverse)


def test_array_feature_extractor() -> None:
    agree("ArrayFeatureExtractor", floats(3, 6), Const([[0, 5, 2]]), domain="ai.onnx.ml")
