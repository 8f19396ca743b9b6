import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from penstock.online.cache.key import cache_key, model_prefix
from penstock.request import Deadline, InferRequest
from penstock.tensor import Array, DataType, to_wire

PREFIX = model_prefix("digest", "1")
NAMES = st.sampled_from(["", "a", "b", "ab", "1:a", "ä"])
SCALARS = st.one_of(st.booleans(), st.integers(-2, 2), st.sampled_from([0.0, -0.0, 1.0]), NAMES)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Few shapes, types and values, so that equal arrays, and unequal arrays with equal bytes, are drawn."""
    datatype = draw(st.sampled_from([DataType.INT8, DataType.UINT8, DataType.FP32, DataType.BOOL, DataType.BYTES]))
    shape = draw(st.sampled_from([(), (0,), (1,), (2,), (1, 2), (2, 1), (4,)]))
    values: Any = st.sampled_from([b"", b"a", b"ab"] if datatype is DataType.BYTES else [0, 1])
    return draw(npst.arrays(datatype.dtype, shape, elements=values, fill=st.nothing()))


REQUESTS = st.builds(
    InferRequest,
    st.just("m"),
    st.dictionaries(NAMES, arrays(), max_size=3),
    outputs=st.lists(NAMES, max_size=2).map(tuple),
    parameters=st.dictionaries(NAMES, SCALARS, max_size=2),
    client=st.sampled_from(["", "a"]),
    id=NAMES,
    priority=st.integers(0, 2),
)


def meaning(request: InferRequest) -> object:
    """The properties by which two requests are equal."""
    inputs = {
        name: (DataType.from_numpy(array.dtype), array.shape, bytes(to_wire(array)))
        for name, array in request.inputs.items()
    }
    parameters = {
        name: (type(value), struct.pack("d", value) if isinstance(value, float) else value)
        for name, value in request.parameters.items()
    }
    return inputs, request.outputs, parameters, request.client


@given(REQUESTS, REQUESTS)
def test_keys_are_equal_exactly_when_requests_are(one: InferRequest, other: InferRequest) -> None:
    assert (cache_key(PREFIX, one) == cache_key(PREFIX, other)) is (meaning(one) == meaning(other))


@given(REQUESTS, st.data())
def test_one_change_makes_another_key(request: InferRequest, data: st.DataObject) -> None:
    key = cache_key(PREFIX, request)
    changed = msgspec.structs.replace(request, inputs=dict(request.inputs), parameters=dict(request.parameters))
    kind = data.draw(st.sampled_from(["input", "output", "parameter", "client", "nothing"]))
    if kind == "input":
        changed.inputs[data.draw(NAMES)] = data.draw(arrays())
    elif kind == "output":
        changed.outputs = (*changed.outputs, "y")
    elif kind == "parameter":
        changed.parameters[data.draw(NAMES)] = data.draw(SCALARS)
    elif kind == "client":
        changed.client += "x"
    assert (cache_key(PREFIX, changed) == key) is (meaning(changed) == meaning(request))


@given(REQUESTS, st.randoms())
def test_order_of_inputs_and_what_does_not_matter(request: InferRequest, random: Any) -> None:
    items, parameters = list(request.inputs.items()), list(request.parameters.items())
    random.shuffle(items)
    random.shuffle(parameters)
    other = InferRequest(
        "m",
        dict(items),
        id="other",
        outputs=request.outputs,
        parameters=dict(parameters) | {"binary_data_output": True, "priority": 3, "timeout": 7},
        client=request.client,
        priority=9,
        timeout_us=5,
        deadline=Deadline(1.0),
    )
    assert cache_key(PREFIX, other) == cache_key(PREFIX, request)


def test_identity_and_version_are_in_the_key() -> None:
    prefixes = [model_prefix(*each) for each in (("digest", "1"), ("digest", "2"), ("other", "1"), ("digest1", ""))]
    request = InferRequest("m", {})
    assert len({cache_key(prefix, request) for prefix in prefixes}) == 4


def test_memory_layout_and_byte_order_do_not_matter() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    same = [array, array.T.copy().T, array.astype(">f4"), np.repeat(array, 2, axis=0)[::2]]
    assert len({cache_key(PREFIX, InferRequest("m", {"x": each})) for each in same}) == 1


def test_floats_are_compared_by_their_bits() -> None:
    quiet, other = (np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001))
    values = [np.array([0.0], np.float32), np.array([-0.0], np.float32), quiet, other]
    assert len({cache_key(PREFIX, InferRequest("m", {"x": each})) for each in values}) == 4


@pytest.mark.parametrize("datatype", DataType)
def test_every_datatype_has_a_key_of_its_own(datatype: DataType) -> None:
    keys = {
        cache_key(PREFIX, InferRequest("m", {"x": np.zeros(0, each.dtype)}))
        for each in (datatype, *(other for other in DataType if other is not datatype))
    }
    assert len(keys) == len(DataType)


def test_text_is_the_bytes_that_it_is_on_the_wire() -> None:
    same = [np.array([b"a", b"bc"], object), np.array(["a", "bc"], object), np.array(["a", "bc"])]
    assert len({cache_key(PREFIX, InferRequest("m", {"x": each})) for each in same}) == 1


def test_nested_parameters_are_compared_whole() -> None:
    def key(value: object) -> bytes | None:
        return cache_key(PREFIX, InferRequest("m", {}, parameters={"p": value}))

    assert key({"a": 1, "b": [2]}) == key({"b": [2], "a": 1}) != key({"a": 1, "b": [3]})


@pytest.mark.parametrize("value", [object(), 1 << 70, "\ud800"])
def test_what_has_no_canonical_form_has_no_key(value: object) -> None:
    assert cache_key(PREFIX, InferRequest("m", {}, parameters={"p": value})) is None
