from __future__ import annotations

import math
import struct
import tracemalloc

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from penstock.errors import InvalidArgument, Unsupported
from penstock.tensor import DataType, Signature, TensorSpec, element_count, from_wire, to_wire

_FIXED_SIZE = [datatype for datatype in DataType if datatype is not DataType.BYTES]
_SHAPES = nps.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def _arrays(draw: st.DrawFn, datatype: DataType) -> np.ndarray:
    """Arrays of any shape and any bit pattern, including NaNs and denormals."""
    shape = draw(_SHAPES)
    count = math.prod(shape)
    if datatype is DataType.BYTES:
        array = np.empty(count, np.object_)
        array[:] = draw(st.lists(st.binary(max_size=20), min_size=count, max_size=count))
        return array.reshape(shape)
    size = count * datatype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if datatype is DataType.BOOL:
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, datatype.dtype).reshape(shape)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes()


@pytest.mark.parametrize("datatype", list(DataType), ids=lambda d: d.value)
@given(data=st.data())
def test_wire_round_trip(datatype: DataType, data: st.DataObject) -> None:
    array = data.draw(_arrays(datatype))
    wire = bytes(to_wire(array))
    assert _same(from_wire(wire, datatype, array.shape), array)
    if datatype is not DataType.BYTES:
        assert len(wire) == array.size * datatype.itemsize


@pytest.mark.parametrize("datatype", _FIXED_SIZE, ids=lambda d: d.value)
def test_any_memory_layout_goes_out_in_row_major_order(datatype: DataType) -> None:
    array = np.arange(12).reshape(3, 4).astype(datatype.dtype)
    for view in (array.T, array[::2, ::-1], np.asfortranarray(array)):
        assert bytes(to_wire(view)) == np.ascontiguousarray(view).tobytes()


def test_the_wire_is_little_endian() -> None:
    assert bytes(to_wire(np.array([1, 258], ">i2"))) == b"\x01\x00\x02\x01"
    assert bytes(to_wire(np.array([1.0], DataType.BF16.dtype))) == b"\x80\x3f"
    assert bytes(to_wire(np.array([b"ab", "π"], np.object_))) == b"\x02\0\0\0ab\x02\0\0\0\xcf\x80"


def test_fixed_size_tensors_are_views_both_ways() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(np.frombuffer(to_wire(array), np.float32), array)
    buffer = bytearray(array.tobytes())
    read = from_wire(memoryview(buffer).toreadonly(), DataType.FP32, (2, 3))
    buffer[:4] = struct.pack("<f", 9)
    assert read[0, 0] == 9
    assert not read.flags.writeable


def test_text_arrays_go_out_as_utf8() -> None:
    assert to_wire(np.array(["é"])) == to_wire(np.array([b"\xc3\xa9"])) == to_wire(np.array(["é"], np.object_))
    with pytest.raises(InvalidArgument, match="must be bytes or text, not int"):
        to_wire(np.array([1], np.object_))


# Lies of the sender


@pytest.mark.parametrize("datatype", list(DataType), ids=lambda d: d.value)
@pytest.mark.parametrize("shape", [(1, 2**40), (2**62, 2**62), (2**31, 2**31, 2**31), (1,) * 100])
def test_huge_shapes_are_refused_before_anything_is_allocated(datatype: DataType, shape: tuple[int, ...]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument):
            from_wire(b"\0" * 7, datatype, shape)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("datatype", list(DataType), ids=lambda d: d.value)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 5), (0, 2**40)])
def test_empty_tensors(datatype: DataType, shape: tuple[int, ...]) -> None:
    array = from_wire(b"", datatype, shape)
    assert array.shape == shape
    assert array.dtype == datatype.dtype
    with pytest.raises(InvalidArgument):
        from_wire(b"\0", datatype, shape)


@given(datatype=st.sampled_from(DataType), shape=st.lists(st.integers(-2, 2**70), max_size=70), data=st.binary())
def test_no_shape_and_buffer_break_more_than_the_request(datatype: DataType, shape: list[int], data: bytes) -> None:
    try:
        array = from_wire(data, datatype, shape)
    except InvalidArgument:
        return
    assert list(array.shape) == shape


@given(shape=st.lists(st.sampled_from([0, 0, 1, 2, 2**30, 2**48, 2**63, 2**70]), max_size=5))
def test_empty_tensors_of_absurd_dimensions(shape: list[int]) -> None:
    try:
        array = from_wire(b"", DataType.FP64, shape)
    except InvalidArgument:
        return
    assert array.size == 0


def test_wrong_size_says_both_sizes() -> None:
    with pytest.raises(InvalidArgument, match=r"shape \[2, 2\] of FP32 takes 16 bytes, but 12 bytes were given"):
        from_wire(b"\0" * 12, DataType.FP32, (2, 2))


def test_negative_dimension() -> None:
    with pytest.raises(InvalidArgument, match="negative dimension"):
        element_count([-1, -4])


@pytest.mark.parametrize(
    ("wire", "count", "message"),
    [
        (b"\x05\0\0\0abc", 1, "declares 5 bytes, but 3 are left"),
        (b"\xff\xff\xff\xff", 1, "declares 4294967295 bytes, but 0 are left"),
        (b"\x01\0\0\0a\0\0", 1, "2 bytes are left over"),
        (b"\x05\0\0\0abcde\0\0\0", 2, "element 1 of 2 is truncated"),
        (b"\0\0\0", 1, "do not fit in 3 bytes"),
        (b"\0\0\0\0", 2**30, "do not fit in 4 bytes"),
    ],
)
def test_lying_bytes_lengths(wire: bytes, count: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        from_wire(wire, DataType.BYTES, (count,))


def test_bool_takes_no_other_byte() -> None:
    with pytest.raises(InvalidArgument, match="must be the byte 0 or 1"):
        from_wire(b"\x00\x02", DataType.BOOL, (2,))


# Names


@pytest.mark.parametrize("datatype", list(DataType), ids=lambda d: d.value)
def test_names_agree_with_numpy_and_onnx(datatype: DataType) -> None:
    assert DataType(datatype.value) is datatype
    assert DataType.from_numpy(datatype.dtype) is datatype
    assert DataType.from_onnx(datatype.onnx) is datatype
    assert onnx.helper.tensor_dtype_to_np_dtype(datatype.onnx) == datatype.dtype
    assert datatype.is_float == (datatype.value in ("FP16", "BF16", "FP32", "FP64"))


def test_what_the_protocol_cannot_name() -> None:
    with pytest.raises(Unsupported, match="numpy dtype 'complex128'"):
        DataType.from_numpy(np.dtype(complex))
    with pytest.raises(Unsupported, match="ONNX element type 14"):
        DataType.from_onnx(onnx.TensorProto.COMPLEX64)
    assert DataType.from_numpy(np.dtype(">f4")) is DataType.FP32
    assert DataType.from_numpy(np.dtype("U5")) is DataType.from_numpy(np.dtype("S5")) is DataType.BYTES


# Signatures

_SIGNATURE = Signature(
    inputs=(TensorSpec("a", DataType.FP32, (-1, 3)), TensorSpec("b", DataType.INT64, (-1,))),
    outputs=(TensorSpec("y", DataType.FP32, (-1, 3)),),
)


def _inputs(batch: int = 2) -> dict[str, np.ndarray]:
    return {"a": np.zeros((batch, 3), np.float32), "b": np.zeros(batch, np.int64)}


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_right_inputs_pass_in_any_order(batch: int) -> None:
    _SIGNATURE.check(_inputs(batch))
    _SIGNATURE.check(dict(reversed(_inputs(batch).items())))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"c": np.zeros(2)}, r"unexpected inference input 'c' \(the model's inputs are \['a', 'b'\]\)"),
        ({"a": np.zeros((2, 3))}, "inference input 'a' data-type is 'FP64', but model expects 'FP32'"),
        ({"a": np.zeros((2, 3), ">f4")}, "data-type is 'FP32', but.*'>f4', and must be 'float32'"),
        ({"a": np.zeros((2, 4), np.float32)}, r"unexpected shape for input 'a'. Expected \[-1, 3\], got \[2, 4\]"),
        (
            {"a": np.zeros((2, 3, 1), np.float32)},
            r"unexpected shape for input 'a'. Expected \[-1, 3\], got \[2, 3, 1\]",
        ),
        ({"a": np.zeros((), np.float32)}, r"unexpected shape for input 'a'. Expected \[-1, 3\], got \[\]"),
        ({"b": np.zeros(1, np.int64)}, "inputs differ in batch size: {'a': 2, 'b': 1}"),
    ],
)
def test_wrong_inputs_say_what_is_wrong(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        _SIGNATURE.check({**_inputs(), **change})


def test_missing_input() -> None:
    with pytest.raises(
        InvalidArgument, match=r"expected 2 inputs but got 1 inputs.*missing required input\(s\) \['b'\]"
    ):
        _SIGNATURE.check({"a": _inputs()["a"]})


def test_batchable_needs_a_free_first_axis_everywhere() -> None:
    def signature(*shapes: tuple[int, ...]) -> Signature:
        specs = tuple(TensorSpec(f"t{i}", DataType.FP32, shape) for i, shape in enumerate(shapes))
        return Signature(specs[:-1], specs[-1:])

    assert signature((-1, 3), (-1,)).batchable
    assert not signature((-1, 3), (1, 3)).batchable
    assert not signature((-1, 3), (2, 3), (-1, 3)).batchable
    assert not signature((), (-1,)).batchable
    assert not signature((-1,)).batchable


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_a_spec_admits_its_shape_with_any_dimension_freed(shape: list[int], data: st.DataObject) -> None:
    freed = tuple(-1 if data.draw(st.booleans()) else dim for dim in shape)
    spec = TensorSpec("x", DataType.FP32, freed)
    assert spec.admits(shape)
    assert not spec.admits([*shape, 1])
    for axis, dim in enumerate(shape):
        other = [*shape[:axis], dim + 1, *shape[axis + 1 :]]
        assert spec.admits(other) == (freed[axis] == -1)
