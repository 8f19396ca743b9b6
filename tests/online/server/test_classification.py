from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.errors import InvalidArgument
from penstock.online.repository.handle import Handle
from penstock.online.server.classification import classify, classify_outputs
from penstock.request import InferResponse
from penstock.tensor import DataType
from penstock.testing import DOUBLER


def test_floats_are_written_as_c_writes_them_and_labelled() -> None:
    array = np.array([[0.1, 0.7, 0.2], [-1, 1e10, np.inf]], np.float32)
    classes = classify("y", array, 2, True, ["cat", "dog"])
    assert classes.tolist() == [[b"0.700000:1:dog", b"0.200000:2"], [b"inf:2", b"10000000000.000000:1:dog"]]


def test_without_a_batch_there_is_one_axis() -> None:
    assert classify("y", np.array([[3, 1], [9, 2]], np.int32), 3, False).tolist() == [b"9:2", b"3:0", b"2:3"]
    assert classify("y", np.array(4, np.int64), 3, True).tolist() == [b"4:0"]


def test_the_extremes_of_integers() -> None:
    assert classify("y", np.array([0, 2**64 - 1, 5], np.uint64), 1, False).tolist() == [b"18446744073709551615:1"]
    assert classify("y", np.array([0, -128, 127], np.int8), 3, False).tolist() == [b"127:2", b"0:0", b"-128:1"]
    assert classify("y", np.array([False, True]), 2, False).tolist() == [b"1:1", b"0:0"]


def test_nan_is_the_least() -> None:
    assert classify("y", np.array([np.nan, -np.inf, 0]), 3, False).tolist() == [b"0.000000:2", b"-inf:1", b"nan:0"]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0,), (0, 0)])
def test_empty_outputs(shape: tuple[int, ...]) -> None:
    classes = classify("y", np.zeros(shape, np.float32), 2, True)
    assert classes.size == 0
    assert classes.shape[0] == shape[0]


@given(arrays.arrays(np.int16, arrays.array_shapes(min_dims=1, max_dims=3, max_side=5)), st.integers(1, 9))
def test_the_greatest_of_each_row_in_order(array: np.ndarray, count: int) -> None:
    classes = classify("y", array, count, True)
    for row, got in zip(array.reshape(len(array), -1).tolist(), classes.tolist(), strict=True):
        want = sorted(enumerate(row), key=lambda one: (-one[1], one[0]))[:count]
        assert got == [b"%d:%d" % (value, index) for index, value in want]


@pytest.mark.parametrize("datatype", [DataType.BYTES, DataType.FP16, DataType.BF16])
def test_datatypes_without_classes(datatype: DataType) -> None:
    with pytest.raises(InvalidArgument, match=f"output 'y'.*{datatype.value}"):
        classify("y", np.zeros((1, 2), datatype.dtype), 1, True)


def test_only_the_outputs_asked_for_are_replaced() -> None:
    y = np.array([[1, 2]], np.float32)
    response = InferResponse("m", "1", {"y": y, "z": y})
    handle = cast(Handle, SimpleNamespace(signature=DOUBLER, labels={"y": ["a", "b"]}))
    classify_outputs(response, {"y": 1, "absent": 1}, handle)
    assert response.outputs["y"].tolist() == [[b"2.000000:1:b"]]
    assert response.outputs["z"] is y
