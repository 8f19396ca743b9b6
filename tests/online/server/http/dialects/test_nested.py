"""Nested lists to tensors and back."""

import json
import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.errors import InvalidArgument
from penstock.online.server.http.dialects.nested import is_named, read_json, read_object, to_array, to_value, write_json
from penstock.online.server.to_thread import finish
from penstock.tensor import DataType, TensorSpec

NUMBERS = [datatype for datatype in DataType if datatype is not DataType.BYTES]


def spec(datatype: DataType) -> TensorSpec:
    return TensorSpec("x", datatype, ())


@pytest.mark.parametrize("datatype", NUMBERS, ids=lambda datatype: datatype.value)
@given(data=st.data())
def test_what_is_written_is_read_again(datatype: DataType, data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    if 0 in shape:
        shape = shape[: shape.index(0) + 1]  # dimensions after a 0 cannot be represented
    wide = np.float32 if datatype.itemsize == 2 and datatype.is_float else datatype.dtype
    array = data.draw(hnp.arrays(wide, shape))
    with np.errstate(all="ignore"):
        array = array.astype(datatype.dtype)
    again = to_array(spec(datatype), finish(read_json(write_json(to_value("y", array)))))
    assert again.dtype == datatype.dtype
    np.testing.assert_array_equal(again.astype(wide), array.astype(wide))


@given(data=st.data(), suffix=st.sampled_from(["", "_bytes"]))
def test_texts_and_bytes(data: st.DataObject, suffix: str) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3))
    elements = st.binary(max_size=4) | st.text(max_size=4).map(lambda text: text.encode(errors="replace"))
    array = np.empty(math.prod(shape), object)
    array[:] = data.draw(st.lists(elements, min_size=array.size, max_size=array.size))
    array = array.reshape(shape)
    again = to_array(spec(DataType.BYTES), finish(read_json(write_json(to_value("y" + suffix, array)))))
    np.testing.assert_array_equal(again, array)


def test_how_it_is_written() -> None:
    floats = np.array([[1, 0.1], [2.5, -3]], np.float32)
    assert write_json(to_value("y", floats)) == b"[[1.0,0.1],[2.5,-3.0]]"
    assert write_json(to_value("y", floats.T)) == b"[[1.0,2.5],[0.10000000149011612,-3.0]]"
    assert write_json({"y": floats[:, 0][0]}) == b'{"y":1.0}'
    odd = np.array([math.nan, math.inf, -math.inf, 1], np.float32)
    assert write_json({"y": to_value("y", odd), "z": odd[0]}) == b'{"y":[NaN,Infinity,-Infinity,1.0],"z":NaN}'
    assert write_json(to_value("y", np.array(5, np.int64))) == b"5"
    assert write_json(to_value("y", np.array([True]))) == b"[true]"
    texts = np.array([b"a", "é".encode()], object)
    assert write_json(to_value("y", texts)) == '["a","é"]'.encode()
    assert write_json(to_value("y_bytes", texts)) == b'[{"b64":"YQ=="},{"b64":"w6k="}]'
    assert write_json(to_value("y", np.array([b"a", b"\xff"], object))) == b'[{"b64":"YQ=="},{"b64":"/w=="}]'
    assert write_json(to_value("y", np.array(["null"], object))) == b'["null"]'


def test_bare_words_are_numbers() -> None:
    array = to_array(spec(DataType.FP32), finish(read_json(b"[NaN, Infinity, -Infinity, 1]")))
    np.testing.assert_array_equal(array, np.array([math.nan, math.inf, -math.inf, 1], np.float32))
    assert finish(read_json(b'["NaN", "Infinity"]')) == ["NaN", "Infinity"]
    assert np.isnan(to_array(spec(DataType.BF16), [math.nan]).astype(np.float32)).all()


def test_base64_without_padding_is_taken() -> None:
    assert to_array(spec(DataType.BYTES), {"b64": "aGk"}).item() == b"hi"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nan", b"[NaN", b'"\xff"', b'"\xffNaN"', b"[" * 100_000, b"[NaN," + b"[" * 100_000, b"[NaN]]"]
)
def test_what_is_no_json(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="JSON Parse error"):
        finish(read_json(body))


@pytest.mark.parametrize("body", [b"[]", b"1", b'"a"', b"null"])
def test_what_is_no_object(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="Is not object"):
        finish(read_object(body))


@pytest.mark.parametrize(
    ("datatype", "value", "message"),
    [
        (DataType.FP32, [[1, 2], [3]], "unevenly"),
        (DataType.FP32, [[1, 2], [3], [4, 5, 6]], "unevenly"),
        (DataType.FP32, [[1], 2], "unevenly"),
        (DataType.FP32, [1, [2]], "unevenly"),
        (DataType.FP32, ["a"], "do not fit FP32"),
        (DataType.FP32, [None], "do not fit FP32"),
        (DataType.FP32, [{"b64": ""}], "do not fit FP32"),
        (DataType.FP32, 1e39, "do not fit FP32"),
        (DataType.INT8, [128], "do not fit INT8"),
        (DataType.INT32, [1.5], "do not fit INT32"),
        (DataType.INT32, [True], "do not fit INT32"),
        (DataType.INT64, [1 << 63], "do not fit INT64"),
        (DataType.BOOL, [1], "do not fit BOOL"),
        (DataType.FP16, [65520], "do not fit FP16: a number is too large"),
        (DataType.BF16, [3.4e38], "do not fit BF16: a number is too large"),
        (DataType.BYTES, [1], "must be a string"),
        (DataType.BYTES, [{"b64": 1}], "must be a string"),
        (DataType.BYTES, [{"b64": "a", "c": 1}], "must be a string"),
        (DataType.BYTES, [{"b64": "?"}], "Unable to decode"),
        (DataType.BYTES, [{"b64": "é"}], "Unable to decode"),
        (DataType.BYTES, ["\ud800"], "Unable to decode"),
        (DataType.BYTES, [""] * ((1 << 20) + 1), "1048577 BYTES elements exceed"),
    ],
)
def test_what_no_tensor_is_made_of(datatype: DataType, value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        to_array(spec(datatype), value)


def test_nesting_is_bounded() -> None:
    value: Any = 1
    for _ in range(33):
        value = [value]
    with pytest.raises(InvalidArgument, match="deeper than 32"):
        to_array(spec(DataType.FP32), value)
    assert to_array(spec(DataType.FP32), value[0]).ndim == 32


def test_an_object_with_a_binary_element_is_no_name() -> None:
    assert not is_named({"b64": "YQ=="})
    assert is_named({"b64": ["YQ=="]})
    assert is_named({"b64": "YQ==", "x": 1})
    assert is_named({})
    assert not is_named([1])


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: json.dumps({"instances": text}).encode()))
def test_any_bytes_are_json_or_refused(body: bytes) -> None:
    with suppress(InvalidArgument):
        finish(read_json(body))
