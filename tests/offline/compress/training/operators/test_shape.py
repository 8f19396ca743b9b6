from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from one_node import Const, Operand, agree, floats

_X = floats(2, 3, 4)
_INT = (TensorProto.INT64,)


@pytest.mark.parametrize(("shape", "zero"), [([4, 6], 0), ([0, -1], 0), ([-1], 0), ([0, 0, 2, 2], 0), ([2, 12], 1)])
def test_reshape(shape: list[int], zero: int) -> None:
    agree("Reshape", _X, Const(shape), allowzero=zero)


def test_reshape_to_nothing() -> None:
    agree("Reshape", _X[:0], Const([3, 0]), allowzero=1)


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1])
def test_flatten(axis: int) -> None:
    agree("Flatten", _X, axis=axis)


def test_flatten_by_default() -> None:
    agree("Flatten", _X)


@pytest.mark.parametrize("perm", [None, [0, 2, 1], [2, 0, 1]])
def test_transpose(perm: list[int] | None) -> None:
    agree("Transpose", _X, **({} if perm is None else {"perm": perm}))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat(axis: int) -> None:
    agree("Concat", _X, floats(2, 3, 4, seed=1), axis=axis)


@pytest.mark.parametrize("axes", [None, [0], [-1], [0, 3]])
def test_squeeze(axes: list[int] | None) -> None:
    x = floats(1, 3, 4, 1)
    agree("Squeeze", x, None if axes is None else Const(axes), opset=13)
    agree("Squeeze", x, opset=11, **({} if axes is None else {"axes": axes}))


@pytest.mark.parametrize("axes", [[0], [-1], [0, 4], [3, 0], [1, -1]])
def test_unsqueeze(axes: list[int]) -> None:
    agree("Unsqueeze", _X, Const(axes), opset=13)
    agree("Unsqueeze", _X, axes=axes, opset=11)


@pytest.mark.parametrize(("start", "end"), [(None, None), (1, None), (0, -1), (-2, 9)])
def test_shape(start: int | None, end: int | None) -> None:
    attributes = {key: value for key, value in (("start", start), ("end", end)) if value is not None}
    agree("Shape", _X, opset=15, kinds=_INT, **attributes)


def test_size() -> None:
    agree("Size", _X, kinds=_INT)


@pytest.mark.parametrize(
    ("starts", "ends", "axes", "steps"),
    [
        ([0, 1], [2, 3], None, None),
        ([1], [9], [2], None),
        ([-3], [-1], [-1], [1]),
        ([0, 0], [9, 9], [1, 2], [2, 3]),
        ([-1], [-9], [2], [-1]),
        ([3], [0], [2], [-2]),
        ([2], [-(2**63)], [1], [-1]),
        ([2], [1], [1], None),
        ([-9], [-(2**62)], [2], [-1]),
    ],
)
def test_slice(starts: list[int], ends: list[int], axes: list[int] | None, steps: list[int] | None) -> None:
    rest = [None if values is None else Const(values) for values in (axes, steps)]
    agree("Slice", _X, Const(starts), Const(ends), *rest)
    if steps is None:
        agree("Slice", _X, opset=9, starts=starts, ends=ends, **({} if axes is None else {"axes": axes}))


def test_slice_by_narrow_integers() -> None:
    agree("Slice", _X, Const([1], np.int32), Const([3], np.int32), Const([2], np.int32))


@pytest.mark.parametrize(("operands", "opset", "attributes"), [
    ((Const([1, 3]),), 13, {"axis": 2}),
    ((None,), 13, {"axis": 2}),
    ((None,), 18, {"axis": 2, "num_outputs": 2}),
    ((None,), 18, {"axis": 1, "num_outputs": 2}),
    ((), 11, {"axis": -1, "split": [1, 3]}),
    ((), 11, {"axis": -1}),
], ids=["opset 13", "even", "num_outputs", "odd", "attribute", "even attribute"])  # fmt: skip
def test_split(operands: tuple[Operand, ...], opset: int, attributes: dict[str, Any]) -> None:
    agree("Split", _X, *operands, opset=opset, kinds=(TensorProto.FLOAT,) * 2, **attributes)


@pytest.mark.parametrize("shape", [[2, 3, 4], [5, 2, 3, 4], [1], [2, 1, 4]])
def test_expand(shape: list[int]) -> None:
    agree("Expand", _X, Const(shape))
    agree("Expand", floats(3, 1), Const([2, 1, 4]))


def test_tile() -> None:
    agree("Tile", _X, Const([2, 1, 3]))


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
@pytest.mark.parametrize("opset", [9, 13, 18])
def test_pad(mode: str, opset: int) -> None:
    pads = [0, 1, 2, 0, 2, 3]
    if opset < 11:
        agree("Pad", _X, opset=opset, mode=mode, pads=pads, value=1.5)
    else:
        agree("Pad", _X, Const(pads), Const(1.5, np.float32), opset=opset, mode=mode)


@pytest.mark.parametrize("pads", [[0, 0, -1, 0, 0, 2], [0, -1, 0, 0, 0, 0]])
def test_pad_crops(pads: list[int]) -> None:
    agree("Pad", _X, Const(pads))


def test_pad_some_axes() -> None:
    agree("Pad", _X, Const([1, 2, 0, 1]), None, Const([-1, 0]), opset=18)


def test_pad_wraps() -> None:
    agree("Pad", _X, Const([0, 1, 2, 0, 2, 3]), mode="wrap", opset=19)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space(mode: str) -> None:
    agree("DepthToSpace", floats(2, 12, 3, 4), blocksize=2, mode=mode)


def test_space_to_depth() -> None:
    agree("SpaceToDepth", floats(2, 3, 4, 6), blocksize=2)


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("diagonal", [None, -1, 2])
def test_trilu(upper: int, diagonal: int | None) -> None:
    agree("Trilu", _X, None if diagonal is None else Const(diagonal), upper=upper)


def test_constant_of_shape() -> None:
    agree("ConstantOfShape", np.array([2, 3], np.int64))
    value = numpy_helper.from_array(np.array([7], np.int64))
    agree("ConstantOfShape", np.array([2, 3], np.int64), value=value, kinds=_INT)
    agree("ConstantOfShape", np.array([], np.int64), value=value, kinds=_INT)


@pytest.mark.parametrize(("start", "limit", "delta"), [(0, 5, 1), (2, 9, 3), (5, 0, -2), (5, 0, 1)])
def test_range(start: int, limit: int, delta: int) -> None:
    agree("Range", *[np.array(value, np.int64) for value in (start, limit, delta)], kinds=_INT)
    agree("Range", *[np.array(value, np.float32) for value in (start, limit, delta)])


@pytest.mark.parametrize("opset", [9, 11, 13])
def test_dropout_drops_nothing(opset: int) -> None:
    agree("Dropout", _X, opset=opset)


def test_dropout_shows_that_it_dropped_nothing() -> None:
    agree("Dropout", _X, opset=13, kinds=(TensorProto.FLOAT, TensorProto.BOOL))


def test_identity() -> None:
    agree("Identity", _X)
