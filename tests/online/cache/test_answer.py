import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from penstock.errors import IntegrityError, PenstockError, Unsupported
from penstock.online.cache.answer import CachedAnswer, freeze, from_bytes
from penstock.request import InferRequest, InferResponse
from penstock.tensor import Array, DataType, to_wire

REQUEST = InferRequest("m", {}, "1", id="17")
SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
NUMBERS = st.sampled_from([each for each in DataType if each is not DataType.BYTES]).flatmap(
    lambda datatype: SHAPES.map(
        lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(datatype.dtype)
    )
)
TEXTS = npst.arrays(object, SHAPES, elements=st.binary(max_size=5), fill=st.nothing())
OUTPUTS = st.dictionaries(st.text(max_size=5), st.one_of(NUMBERS, TEXTS), max_size=3)
PARAMETERS = st.dictionaries(
    st.text(max_size=5), st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text()), max_size=3
)


def same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bytes(to_wire(one)) == bytes(to_wire(other))


def head(*outputs: object, parameters: object = None) -> bytes:
    encoded = msgspec.msgpack.encode([list(outputs), {} if parameters is None else parameters])
    return b"PSA1" + struct.pack("<I", len(encoded)) + encoded


@given(OUTPUTS, PARAMETERS)
def test_stored_and_read_it_is_the_same(outputs: dict[str, Array], parameters: dict[str, object]) -> None:
    answer = freeze(InferResponse("m", "1", outputs, "4", parameters))
    again = from_bytes(answer.to_bytes())
    for each in (answer, again):
        response = each.to(REQUEST)
        assert (response.model_name, response.model_version, response.id, response.final) == ("m", "1", "17", True)
        assert list(response.outputs) == list(outputs)
        assert all(same(response.outputs[name], outputs[name]) for name in outputs)
        assert repr(response.parameters) == repr(parameters)


@given(st.binary(max_size=200))
def test_hostile_bytes_are_refused(data: bytes) -> None:
    for each in (data, b"PSA1" + data, b"PSA1" + struct.pack("<I", len(data)) + data):
        with pytest.raises(IntegrityError):
            from_bytes(each)


@given(OUTPUTS, PARAMETERS, st.data())
def test_altered_bytes_are_refused_or_make_an_answer_of_that_size(
    outputs: dict[str, Array], parameters: dict[str, object], data: st.DataObject
) -> None:
    stored = bytearray(freeze(InferResponse("m", "1", outputs, "", parameters)).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    cut = stored[: data.draw(st.integers(0, len(stored)))] if data.draw(st.booleans()) else stored
    try:
        answer = from_bytes(bytes(cut))
    except IntegrityError:
        return
    assert sum(len(to_wire(array)) for array in answer.outputs.values()) <= len(cut)


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"PSA2" + head()[4:],
        head() + b"x",
        head(["y", "FP32", [1], 4]),
        head(["y", "FP32", [1], -4]),
        head(["y", "FP32", [2**40, 2**40], 4]) + bytes(4),
        head(["y", "FP32", [0, 2**62], 0]),
        head(["y", "FP64", [1], 4]) + bytes(4),
        head(["y", "FP13", [1], 4]) + bytes(4),
        head(["y", "BOOL", [1], 1]) + b"\x02",
        head(["y", "BYTES", [2**40], 4]) + bytes(4),
        head(["y", "BYTES", [1], 4]) + struct.pack("<I", 2**32 - 1),
        head(["y", "INT8", [1], 1], ["y", "INT8", [1], 1]) + bytes(2),
        head(["y", "INT8", [1]]),
        head(["y", "INT8", [1.5], 1]) + bytes(1),
        head(parameters={"p": [1]}),
        head(parameters={"p": None}),
        b"PSA1" + struct.pack("<I", 2**32 - 1),
        b"PSA1" + struct.pack("<I", 5) + b"\xdd\xff\xff\xff\xff",
        b"PSA1" + struct.pack("<I", 100_000) + b"\x91" * 100_000,
    ],
)
def test_what_lies_is_refused_without_taking_memory_for_it(stored: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(IntegrityError):
        from_bytes(stored)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


@pytest.mark.parametrize("array", [np.ones((1, 2), np.float32), np.array([b"a"], object), np.zeros((0, 2), np.int8)])
def test_nobody_can_alter_it(array: Array) -> None:
    original = array.copy()
    answer = freeze(InferResponse("m", "1", {"y": array}))
    array[...] = b"b" if array.dtype == object else 7
    response = answer.to(REQUEST)
    with pytest.raises(ValueError, match="WRITEABLE"):
        response.outputs["y"].flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        response.outputs["y"][...] = array
    response.outputs["more"] = response.outputs.pop("y")
    response.parameters["p"] = 1
    again = answer.to(REQUEST)
    assert same(again.outputs["y"], original)
    assert again.parameters == {}


def test_it_keeps_no_buffer_of_the_batch_alive() -> None:
    batch = np.zeros((64, 2), np.float32)
    answer = freeze(InferResponse("m", "1", {"y": batch[3:4]}))
    root: object = answer.outputs["y"]
    while isinstance(root, np.ndarray) and root.base is not None:
        root = root.base
    assert isinstance(root, bytes)
    assert len(root) == 8


@pytest.mark.parametrize(
    "outputs",
    [
        {"y": np.zeros((1, 8), np.float32)},
        {"y": np.zeros(100_000, np.float32)},
        {"y": np.array([b"x" * n for n in range(100)], object)},
        {name: np.zeros((1, 1), np.float32) for name in "abcdefgh"},
    ],
)
def test_its_size_covers_the_memory_that_it_takes(outputs: dict[str, Array]) -> None:
    response = InferResponse("m", "1", outputs, parameters={"text": "x" * 100, "n": 1})
    kept: dict[bytes, CachedAnswer] = {}
    freeze(response)
    tracemalloc.start()
    for number in range(100):
        kept[number.to_bytes(32, "big")] = freeze(response)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken <= sum(answer.size_bytes for answer in kept.values())


@pytest.mark.parametrize(
    "response",
    [
        InferResponse("m", "1", {"y": np.zeros(1, np.complex64)}),
        InferResponse("m", "1", {"y": np.array([object()], object)}),
        InferResponse("m", "1", {}, parameters={"p": [1]}),
    ],
)
def test_what_is_not_of_the_protocol_is_not_kept(response: InferResponse) -> None:
    with pytest.raises(PenstockError):
        freeze(response)
    with pytest.raises(Unsupported):
        freeze(InferResponse("m", "1", {}, parameters={"p": None}))


def test_a_number_beyond_64_bits_is_not_stored() -> None:
    with pytest.raises(IntegrityError):
        freeze(InferResponse("m", "1", {}, parameters={"p": 1 << 70})).to_bytes()
