import json
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.online.server.http.codec.json_tensor import from_json, to_json
from penstock.tensor import DataType
from tensors import JSON_TYPES, tensors


@given(tensors(JSON_TYPES), st.booleans())
def test_what_is_written_can_be_read(array: np.ndarray, nested: bool) -> None:
    values = json.loads(to_json("x", array))
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        np.testing.assert_array_equal(np.array(values, array.dtype), array.ravel())
        return
    if nested and array.ndim and array.dtype.kind != "O" and array.size:
        values = orjson.loads(orjson.dumps(array.tolist()))
    got = from_json("x", DataType.from_numpy(array.dtype).value, array.shape, values)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.BF16])
def test_halves_have_no_json_form(datatype: DataType) -> None:
    with pytest.raises(InvalidArgument, match=f"input 'x': {datatype.value} has no JSON form"):
        from_json("x", datatype.value, [1], [1.0])
    with pytest.raises(InvalidArgument, match=f"output 'y': {datatype.value} has no JSON form"):
        to_json("y", np.zeros(2, datatype.dtype))


def test_infinities_and_nan_are_bare_words() -> None:
    assert to_json("y", np.array([np.nan, np.inf, -np.inf, 0.1], np.float32)[:3]) == b"[NaN,Infinity,-Infinity]"
    assert to_json("y", np.array([0.1], np.float32)) == b"[0.1]"


def test_the_memory_of_sizes_is_bounded() -> None:
    for count in range(3000):
        assert from_json("x", "INT8", [count], [1] * count).shape == (count,)


@pytest.mark.parametrize(
    ("datatype", "kind", "most"),
    [
        ("FP32", np.float64, 4),
        ("FP32", np.int64, 4),
        ("INT8", np.int64, 1),
        ("FP64", np.int64, 0),
        ("UINT64", np.int64, 0),
    ],
)
def test_long_lists_are_converted_with_little_more_memory_than_the_result(datatype: str, kind: Any, most: int) -> None:
    count = 1_000_000
    values = (np.arange(count) % 100).astype(kind)
    expected = values.astype(DataType(datatype).dtype)
    tracemalloc.start()
    try:
        array = from_json("x", datatype, [count], values)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert array.dtype == expected.dtype
    assert np.array_equal(array, expected)
    assert peak <= most * count + 500_000


@pytest.mark.parametrize("place", [0, 16_384, 99_999])
def test_a_number_too_large_is_found_anywhere_in_a_long_list(place: int) -> None:
    values = np.zeros(100_000)
    values[place] = 1e39
    with pytest.raises(InvalidArgument, match="too large"):
        from_json("x", "FP32", [100_000], values)
