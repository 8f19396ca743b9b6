"""Typed contents: all integers that protobuf can encode, and the cost of rejecting invalid contents."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer_requests import TYPED, field, tensors
from penstock.errors import InvalidArgument
from penstock.online.server.grpc.contents import decode_contents, decoded_bytes
from penstock.online.server.request_layout import VARIABLE, TensorLayout
from penstock.protocol import messages
from penstock.protocol.varint import write_varint
from penstock.tensor import Array, DataType, to_wire

INTEGERS = [datatype for datatype in TYPED if "int" in TYPED[datatype] or datatype is DataType.BOOL]


def layout(datatype: DataType, *shape: int) -> TensorLayout:
    size = int(np.prod(shape)) * datatype.itemsize if datatype.itemsize else VARIABLE
    return TensorLayout("x", datatype, shape, size)


def decode(datatype: DataType, data: bytes, *shape: int) -> Array:
    return decode_contents("m", layout(datatype, *shape), data)


@given(tensors(list(TYPED)))
def test_contents_come_out_as_they_went_in(array: np.ndarray) -> None:
    datatype = DataType.from_numpy(array.dtype)
    contents = messages.InferTensorContents()
    getattr(contents, TYPED[datatype]).extend(array.ravel().tolist())
    data = contents.SerializeToString()
    found = decode(datatype, data, *array.shape)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert bytes(to_wire(found)) == bytes(to_wire(array))
    if datatype is not DataType.BYTES:
        assert found.nbytes <= decoded_bytes(layout(datatype, *array.shape), len(data)) or datatype.is_float


@given(st.sampled_from(INTEGERS), st.lists(st.integers(0, 2**70 - 1), max_size=20), st.integers(0, 3))
def test_every_varint_means_what_protobuf_says(datatype: DataType, numbers: list[int], cut: int) -> None:
    """Numbers that are too large are truncated to the field's width; overlong and malformed varints are rejected."""
    number = messages.InferTensorContents.DESCRIPTOR.fields_by_name[TYPED[datatype]].number
    packed = b"".join(map(write_varint, numbers))
    data = field(number, packed[: len(packed) - cut])
    try:
        values = list(getattr(messages.InferTensorContents.FromString(data), TYPED[datatype]))
        expected = np.array(values, datatype.dtype)
    except Exception:  # noqa: BLE001 - protobuf's for what is malformed, numpy's for what does not fit
        with pytest.raises(InvalidArgument):
            decode(datatype, data, len(numbers))
        return
    np.testing.assert_array_equal(decode(datatype, data, len(values)), expected)


def test_a_long_list_is_decoded_across_slices() -> None:
    values = np.random.default_rng(1).integers(-(2**31), 2**31, 100_000, np.int64)
    contents = messages.InferTensorContents(int64_contents=values.tolist()).SerializeToString()
    np.testing.assert_array_equal(decode(DataType.INT64, contents, 1000, 100), values.reshape(1000, 100))


def test_floats_are_views_of_the_message() -> None:
    data = messages.InferTensorContents(fp32_contents=[1.5] * 1000).SerializeToString()
    assert np.shares_memory(decode(DataType.FP32, data, 1000), np.frombuffer(data, np.uint8))
    assert decoded_bytes(layout(DataType.FP32, 1000), len(data)) == 0


@pytest.mark.parametrize(
    ("datatype", "data", "shape", "message"),
    [
        (DataType.INT8, field(2, write_varint(128)), [1], "do not fit INT8: 128"),
        (DataType.UINT8, field(4, write_varint(256)), [1], "do not fit UINT8: 256"),
        (DataType.INT32, field(2, b"\x80"), [0], "contents of input 'x' are malformed"),
        (DataType.INT64, field(3, b"\xff" * 10 + b"\x01"), [1], "contents of input 'x' are malformed"),
        (DataType.FP32, field(6, bytes(7)), [1], "contents of input 'x' are malformed"),
        (DataType.INT32, field(2, bytes(3)), [2], "needs 2 elements, but 'int_contents' has more"),
        (DataType.INT32, field(2, bytes(1)), [2], "needs 2 elements, but 'int_contents' has 1"),
        (DataType.BYTES, field(8, b"a"), [2], "needs 2 elements, but 'bytes_contents' has 1"),
        (DataType.INT32, field(4, bytes(1)), [1], "'uint_contents', expected 'int_contents'"),
        (DataType.FP16, field(6, bytes(4)), [1], "FP16 has no typed contents"),
        (DataType.INT32, b"\x10\x01" * (1 << 20), [1 << 20], "have 2097152 bytes and are not a single packed list"),
    ],
)
def test_what_is_refused(datatype: DataType, data: bytes, shape: list[int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decode(datatype, data, *shape)


@pytest.mark.parametrize(
    ("datatype", "data", "shape"),
    [
        (DataType.INT64, field(3, bytes(8 << 20)), [7]),
        (DataType.BOOL, field(1, bytes(8 << 20)), [7]),
        (DataType.INT32, field(2, bytes(8 << 20)), [1 << 40]),
        (DataType.BYTES, b"\x42\x00" * (4 << 20), [7]),
        (DataType.FP32, field(6, bytes(8 << 20)), [7]),
    ],
)
def test_contents_of_another_number_cost_no_memory(datatype: DataType, data: bytes, shape: list[int]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="but '.*_contents' has"):
            decode(datatype, data, *shape)
        assert tracemalloc.get_traced_memory()[1] < (9 << 20), "no more than a byte for each"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("datatype", "data", "count"),
    [
        (DataType.INT64, field(3, bytes(1 << 20)), 1 << 20),
        (DataType.INT32, field(2, (b"\xff" * 9 + b"\x01") * (1 << 17)), 1 << 17),
        (DataType.BOOL, field(1, b"\x01" * (1 << 20)), 1 << 20),
        (DataType.BYTES, b"\x42\x02ab" * (1 << 17), 1 << 17),
        (DataType.BYTES, b"\x42\x00" * (1 << 17), 1 << 17),
    ],
)
def test_decoding_takes_the_memory_that_is_told_beforehand(datatype: DataType, data: bytes, count: int) -> None:
    tensor: Any = layout(datatype, count)
    tracemalloc.start()
    try:
        decode_contents("m", tensor, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < decoded_bytes(tensor, len(data)) + (5 << 20), "besides what one slice takes"
