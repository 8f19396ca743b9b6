import math
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from penstock.errors import InvalidData, Unsupported
from penstock.offline.convert.base import Axis, ConvertOptions, Exported, InputSpec, TensorLink, UnsupportedOperator
from penstock.offline.convert.worker import wire
from penstock.tensor import DataType, Signature, TensorSpec

SPEC = TensorSpec("x", DataType.FP32, (-1, 3))
SCALARS = [DataType(name) for name in DataType.__members__ if name != "BYTES"]
ARRAYS = st.one_of(
    st.sampled_from(SCALARS).flatmap(
        lambda kind: arrays_of.arrays(
            np.float32 if kind is DataType.BF16 else kind.dtype,
            arrays_of.array_shapes(min_dims=0, min_side=0, max_side=4),
        ).map(lambda array: array.astype(kind.dtype))
    ),
    st.lists(st.binary(max_size=20), max_size=5).map(lambda items: np.array([*items, b""], object)[:-1]),
)
MESSAGES = [
    wire.Open(
        "fake",
        Path("/a/b"),
        ConvertOptions(
            (InputSpec("x", DataType.FP32, ("N", 3)), InputSpec("y", None, None)),
            {"x": np.ones((2, 3), np.float32)},
            {"x": {0: "batch"}},
            weights=Path("/c"),
        ),
    ),
    wire.Values({"x": np.array([True, False]), "s": np.array([b"text", b""], object)}, ("a", "b")),
    wire.Probe(7),
    wire.Export(Path("/x"), 21),
    wire.Opened("TensorFlow", "2", Signature((SPEC,), (SPEC,)), {"x": (Axis(0, "batch"),)}, ("a note",)),
    wire.Arrays({"x": np.arange(6, dtype=np.float64).reshape(2, 3), "y": np.zeros((0, 5), ml_dtypes.bfloat16)}),
    wire.Calls(({"x": np.ones(3, np.float32), "s": np.array([b"a"], object)}, {}, {"x": np.zeros(0, np.int64)})),
    wire.Written(Exported("tf2onnx 1", (TensorLink("a", "b", "c"),), ("d",), ("e",))),
    wire.Refused("NotFound", "message", "hint", (UnsupportedOperator("op", "where", "way out"),)),
]


def frame(message):
    """The header and the body, as they arrive."""
    data = bytearray().join(wire.encode(message))
    header, body = wire.PREFIX.unpack_from(data)
    assert len(data) == wire.PREFIX.size + header + body
    return data[wire.PREFIX.size :][:header], data[wire.PREFIX.size + header :]


def decoded(header, body):
    return wire.decode(bytes(header), bytearray(body), wire.Question | wire.Answer)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_arrives(message):
    assert repr(decoded(*frame(message))) == repr(message)


@given(st.dictionaries(st.text(max_size=9), ARRAYS, max_size=4))
def test_arrays_arrive_with_type_shape_and_bits(arrays):
    found = decoded(*frame(wire.Arrays(arrays))).arrays
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tolist() == array.tolist() or found[name].tobytes() == array.tobytes()
        assert found[name].flags.aligned
        assert found[name].flags.writeable


def test_arrays_that_are_not_contiguous_arrive():
    array = np.arange(24, dtype=">i4").reshape(2, 3, 4).transpose(2, 0, 1)[::2]
    np.testing.assert_array_equal(decoded(*frame(wire.Arrays({"x": array}))).arrays["x"], array)


def test_a_number_of_numpy_arrives_as_an_array():
    found = decoded(*frame(wire.Arrays({"x": np.float32(2.5)}))).arrays["x"]
    assert (found.dtype, found.shape, found.tolist()) == (np.float32, (), 2.5)


def test_text_arrives_as_bytes():
    assert decoded(*frame(wire.Arrays({"x": np.array(["é"])}))).arrays["x"].tolist() == ["é".encode()]


def test_an_array_without_a_datatype_is_refused():
    with pytest.raises(Unsupported, match="complex64"):
        wire.encode(wire.Arrays({"x": np.zeros(1, np.complex64)}))


def outcome(header, body):
    try:
        message = decoded(header, body)
    except InvalidData:
        return
    arrays = message.arrays if isinstance(message, wire.Arrays) else {}
    assert sum(array.nbytes for array in arrays.values()) <= len(body) * 8


@pytest.mark.parametrize("message", MESSAGES)
def test_no_changed_byte_is_worse_than_an_error(message):
    header, body = frame(message)
    for part in (header, body):
        for index in range(len(part)):
            for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
                part[index] ^= mask
                outcome(header, body)
                part[index] ^= mask


@pytest.mark.parametrize("message", MESSAGES)
def test_a_truncated_message_is_an_error(message):
    header, body = frame(message)
    for size in range(len(header)):
        with pytest.raises(InvalidData):
            decoded(header[:size], body)
    for size in range(len(body)):
        with pytest.raises(InvalidData):
            decoded(header, body[:size])
    with pytest.raises(InvalidData):
        decoded(header, body + bytes(16))


@given(st.binary(max_size=200), st.binary(max_size=64))
def test_rubbish_is_an_error(header, body):
    outcome(header, body)


def test_arrays_cannot_share_bytes():
    """Otherwise a short message could stand for much memory."""
    header, body = frame(wire.Arrays({"a": np.array([b"x" * 11], object), "b": np.array([b"y" * 11], object)}))
    with pytest.raises(InvalidData, match="are left"):
        decoded(header, body[:16])


@pytest.mark.parametrize("shape", [(-1,), (1 << 62, 1 << 62), (1,) * 65, (math.comb(60, 30),)])
def test_shapes_that_no_array_has_are_errors(shape):
    header, body = frame(wire.Refused("", ""))
    header = msgspec.msgpack.encode({"type": "Arrays", "arrays": {"x": ("FP32", shape, 0)}})
    with pytest.raises(InvalidData, match="malformed"):
        decoded(header, body)


def test_a_header_that_is_nested_deeply_is_an_error():
    with pytest.raises(InvalidData):
        decoded(b"\x91" * 100_000 + b"\xc0", b"")
