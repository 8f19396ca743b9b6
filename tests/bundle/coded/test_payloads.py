from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from penstock.bundle.coded.payloads import ITEM_SIZES, find_payloads
from penstock.tensor import Array


def model(*tensors: onnx.TensorProto) -> bytes:
    graph = helper.make_graph([], "g", [], [], list(tensors))
    return bytes(helper.make_model(graph).SerializeToString())


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int8", "int64", "bool", "float16", "float64"])
def test_raw_data_is_found_in_place(dtype: str) -> None:
    arrays = {
        "a": np.arange(6).reshape(2, 3).astype(dtype),
        "scalar": np.ones((), dtype),
        "empty": np.ones((0,), dtype),
    }
    data = model(*(numpy_helper.from_array(array, name) for name, array in arrays.items()))
    found = find_payloads(data)
    assert [(one.name, one.dtype, one.shape) for one in found] == [
        (name, dtype, array.shape) for name, array in arrays.items()
    ]
    for one in found:
        assert data[one.start : one.stop] == arrays[one.name].tobytes()
        assert one.stop - one.start == ITEM_SIZES[dtype] * arrays[one.name].size


def test_tensors_without_raw_data_of_a_plain_type_are_passed_over() -> None:
    typed = helper.make_tensor("typed", TensorProto.FLOAT, [2], [1.0, 2.0])
    text = helper.make_tensor("text", TensorProto.STRING, [1], [b"x"])
    short = TensorProto(name="short", data_type=TensorProto.FLOAT, dims=[3], raw_data=b"1234")
    four_bits = TensorProto(name="four", data_type=TensorProto.INT4, dims=[2], raw_data=b"1")
    plain = numpy_helper.from_array(np.ones(2, np.float32), "plain")
    assert [one.name for one in find_payloads(model(typed, text, short, four_bits, plain))] == ["plain"]


def test_a_tensor_outside_the_main_graphs_initializers_is_passed_over() -> None:
    value = numpy_helper.from_array(np.ones(2, np.float32))
    graph = helper.make_graph([helper.make_node("Constant", [], ["y"], value=value)], "g", [], [])
    assert find_payloads(helper.make_model(graph).SerializeToString()) == []


DATA = model(numpy_helper.from_array(np.arange(50, dtype=np.float32), "w"))


@given(st.integers(0, len(DATA) - 1), st.integers(0, 255))
def test_damaged_bytes_give_payloads_within_the_file_or_a_value_error(position: int, value: int) -> None:
    damaged = bytearray(DATA)
    damaged[position] = value
    try:
        found = find_payloads(bytes(damaged))
    except ValueError:
        return
    assert all(0 <= one.start <= one.stop <= len(damaged) for one in found)


def test_bytes_that_are_no_message() -> None:
    with pytest.raises(ValueError, match="wire type 7"):
        find_payloads(b"\x0f\x00")
    with pytest.raises(ValueError, match="unterminated varint"):
        find_payloads(b"\xff" * 12)
    assert find_payloads(b"") == []


def test_shapes_written_one_by_one_are_read_too() -> None:
    array: Array = np.ones((2, 1), np.int8)
    tensor = b"\x08\x02\x08\x01\x10\x03\x42\x01w\x4a\x02" + array.tobytes()
    graph = b"\x2a" + bytes([len(tensor)]) + tensor
    (found,) = find_payloads(b"\x3a" + bytes([len(graph)]) + graph)
    assert (found.name, found.dtype, found.shape) == ("w", "int8", (2, 1))
