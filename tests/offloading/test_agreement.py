"""Both sides must have the same model, and the same answers within a tolerance."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import InvalidArgument, WrongResult
from penstock.offloading.agreement import check_equal, check_same
from penstock.tensor import Array, DataType, Signature, TensorSpec


def signature(datatype: DataType = DataType.FP32, shape: tuple[int, ...] = (-1, 3), output: str = "y") -> Signature:
    return Signature((TensorSpec("x", datatype, shape),), (TensorSpec(output, DataType.FP32, (-1, 2)),))


def test_sizes_and_additional_tensors_may_differ() -> None:
    more = (*signature(shape=(8, 3)).outputs, TensorSpec("z", DataType.FP32, (1,)))
    check_same(signature(), Signature(signature(shape=(8, 3)).inputs, more), "net")


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (signature(DataType.FP64), r"input 'x' is FP32 \[-1, 3\], but model 'net' on the server has FP64 \[-1, 3\]"),
        (signature(shape=(-1, 3, 1)), r"the server has FP32 \[-1, 3, 1\]"),
        (signature(output="z"), r"output 'y' is FP32 \[-1, 2\], but model 'net' on the server has none"),
    ],
)
def test_other_tensors_are_refused(there: Signature, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        check_same(signature(), there, "net")


@pytest.mark.parametrize(
    ("one", "two", "is_equal"),
    [
        (np.array([100.0, 1.0]), np.array([100.0, 1.9]), True),  # 1 % of the largest value
        (np.array([100.0, 1.0]), np.array([100.0, 2.1]), False),
        (np.array([1.0, np.nan, np.inf]), np.array([1.0, np.nan, np.inf]), True),
        (np.array([1.0, np.nan]), np.array([1.0, 0.0]), False),
        (np.array([1.0, np.inf]), np.array([1.0, -np.inf]), False),
        (np.array([1.0, 1.0]), np.array([1.0]), False),
        (np.array([100]), np.array([101]), False),
        (np.array([b"a"], object), np.array([b"a"], object), True),
        (np.array([b"a"], object), np.array([b"b"], object), False),
    ],
)
def test_answers_are_compared(one: Array, two: Array, is_equal: bool) -> None:
    if is_equal:
        check_equal({"y": one}, {"y": two}, 0.01)
        return
    with pytest.raises(WrongResult, match="output 'y' differs"):
        check_equal({"y": one}, {"y": two}, 0.01)
