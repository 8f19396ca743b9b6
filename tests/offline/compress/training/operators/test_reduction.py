from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from one_node import Const, agree, floats

_X = floats(3, 4, 5)
_INT = (TensorProto.INT64,)


@pytest.mark.parametrize(
    "op_type",
    ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum",
     "ReduceLogSumExp", "ReduceProd"],
)  # fmt: skip
@pytest.mark.parametrize("axes", [None, [0], [-1, 1]], ids=str)
@pytest.mark.parametrize("keep", [0, 1])
def test_reductions(op_type: str, axes: list[int] | None, keep: int) -> None:
    x = floats(3, 4, 5, low=0.5)
    agree(op_type, x, None if axes is None else Const(axes), keepdims=keep, opset=18)
    agree(op_type, x, keepdims=keep, opset=11, **({} if axes is None else {"axes": axes}))


def test_reduction_of_nothing() -> None:
    agree("ReduceSum", _X, None, noop_with_empty_axes=1, opset=13)
    agree("ReduceMean", _X, Const([]), noop_with_empty_axes=1, opset=18)


def test_reduction_of_integers() -> None:
    agree("ReduceProd", np.array([2, 3, 4], np.int64), keepdims=0, kinds=_INT)


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opset", [9, 11, 12, 13, 18])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_softmax(op_type: str, opset: int, axis: int | None) -> None:
    agree(op_type, 5 * floats(2, 3, 4), opset=opset, **({} if axis is None else {"axis": axis}))


@pytest.mark.parametrize("op_type", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_arg_max_and_min(op_type: str, keep: int, last: int, axis: int) -> None:
    ties = np.random.default_rng(0).integers(0, 2, (3, 6)).astype(np.float32)
    agree(op_type, ties, axis=axis, keepdims=keep, select_last_index=last, kinds=_INT)
