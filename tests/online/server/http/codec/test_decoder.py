import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handles import described
from penstock.errors import InvalidArgument, NotFound
from penstock.online.server.answer_form import ALL, NONE
from penstock.online.server.http.codec.decoder import HttpRequestDecoder
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.request import InferRequest
from penstock.tensor import DataType, TensorSpec, to_wire
from tensors import tensors

DECODE = HttpRequestDecoder(SharedMemory(enabled=True))


def decode(body: Any, tail: bytes | None = None) -> InferRequest:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return DECODE(described(), text + (tail or b""), None if tail is None else len(text))[0]


def tensor(datatype: str = "FP32", shape: Any = (2,), data: Any = (1, 2), **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data, **more}]}


def raw(size: Any, datatype: str = "FP32", shape: Any = (2,)) -> dict[str, Any]:
    made = tensor(datatype, shape, parameters={"binary_data_size": size})
    del made["inputs"][0]["data"]
    return made


def in_region(**parameters: Any) -> dict[str, Any]:
    made = raw(0)
    made["inputs"][0]["parameters"] = parameters
    return made


def with_output(**parameters: Any) -> dict[str, Any]:
    return {**tensor(), "outputs": [{"name": "y", "parameters": parameters}, {"name": "z"}]}


@given(st.lists(tensors(list(DataType)), min_size=1, max_size=3))
def test_binary_requests_come_out_as_they_went_in(given_arrays: list[np.ndarray]) -> None:
    tails = [bytes(to_wire(array)) for array in given_arrays]
    inputs = [
        {
            "name": f"x{n}",
            "shape": array.shape,
            "datatype": DataType.from_numpy(array.dtype).value,
            "parameters": {"binary_data_size": len(tail)},
        }
        for n, (array, tail) in enumerate(zip(given_arrays, tails, strict=True))
    ]
    for _ in range(2):  # once as new, once as known
        decoded = decode({"inputs": inputs}, b"".join(tails))
        for n, array in enumerate(given_arrays):
            got = decoded.inputs[f"x{n}"]
            assert (got.dtype, got.shape) == (array.dtype, array.shape)
            assert bytes(to_wire(got)) == tails[n]


@pytest.mark.parametrize("rank", [33, 64])
def test_tensors_have_up_to_64_dimensions(rank: int) -> None:
    shape = [1] * (rank - 1) + [2]
    nested = np.array([1.5, 2]).reshape(shape).tolist()
    for body, tail in (
        (tensor(shape=shape), None),
        (tensor(shape=shape, data=nested), None),
        (raw(8, shape=shape), bytes(8)),
    ):
        assert decode(body, tail).inputs["x"].shape == tuple(shape)


def test_binary_arrays_are_views_of_the_body() -> None:
    text = json.dumps(raw(8)).encode()
    body = text + bytes(8)
    request, _ = DECODE(described(), body, len(text))
    assert request.inputs["x"].base is body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not an inference request"),
        (b"{", "not an inference request"),
        (b"\xff\xfe", "not an inference request"),
        ({}, "missing required field `inputs`"),
        ({"inputs": 5}, "Expected `array`"),
        (b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * 100_000, "nested too deeply"),
        (tensor(data=json.loads("[" * 500 + "]" * 500)), "needs 2 elements"),
        (tensor("FP33"), "invalid datatype for input x: 'FP33'"),
        (tensor("fp32"), "invalid datatype"),
        (tensor("FP16"), "FP16 has no JSON form"),
        (tensor("BF16"), "BF16 has no JSON form"),
        (tensor(shape=[-1]), "Expected `int` >= 0"),
        (tensor(shape=[1.5]), "Expected `int`"),
        (tensor(shape=[1] * 65), "length <= 64"),
        (tensor(shape=[1, 1 << 40]), "needs 1099511627776 elements, but 'data' has 2"),
        (tensor(shape=[1 << 40, 1 << 40, 1 << 40]), "elements, but 'data' has 2"),
        (tensor(shape=[0, 1 << 62, 4], data=[]), "is too large"),
        (tensor("INT64", [0, 1 << 62, 4], []), "is too large"),
        (tensor("BYTES", [0, 1 << 62, 4], []), "is too large"),
        (tensor(shape=[0, (1 << 64) - 1], data=[]), "is too large"),
        (tensor(data=[1, "2"]), "do not fit FP32"),
        (tensor(data=[True, False]), "do not fit FP32"),
        (tensor(data=[1e39, 0]), "do not fit FP32"),
        (tensor(data=[[1], 2]), "nested unevenly"),
        (tensor(data={"a": 1}), "Expected `array`"),
        (tensor("INT32", data=[True, False]), "do not fit INT32"),
        (tensor("INT32", data=[1.5, 2]), "do not fit INT32"),
        (tensor("INT8", data=[128, 0]), "do not fit INT8"),
        (tensor("UINT64", data=[-1, 0]), "do not fit UINT64"),
        (tensor("UINT64", data=[1 << 64, 0]), "do not fit UINT64"),
        (tensor("BOOL", data=[0, 1]), "do not fit BOOL"),
        (tensor("BYTES", data=[1, 2]), "do not fit BYTES"),
        ({"inputs": tensor()["inputs"] * 2}, "input 'x' already exists in request"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2]}]}, "has no data"),
        (raw(8), "requires the header Inference-Header-Content-Length"),
        (tensor(parameters={"binary_data_size": 8}), "must set only one of the following fields"),
        (raw("8"), "must be a whole number"),
        (raw(True), "must be a whole number"),
        (raw(-8), "must be a whole number"),
        ({**tensor(), "parameters": {"x": [1]}}, "not an inference request"),
        ({**tensor(), "outputs": [{"name": "y"}, {"name": "y"}]}, "requested twice"),
        ({**tensor(), "parameters": {"binary_data_output": "false"}}, "'binary_data_output' must be true or false"),
        ({**tensor(), "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "'binary_data' must be true"),
    ],
)
def test_json_that_is_refused(body: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decode(body)


@pytest.mark.parametrize(
    ("body", "tail", "message"),
    [
        (raw(8), bytes(7), "unexpected size for input 'x', expecting 1 additional bytes for model 'm'"),
        (raw(8), bytes(9), "unexpected additional input data for model 'm'"),
        (raw(9), bytes(9), "takes 8 bytes, but 'binary_data_size' is 9"),
        (raw(1 << 42, shape=[1, 1 << 40]), bytes(8), "expecting"),
        (raw(8, "BYTES"), b"\x09\0\0\0abcd", "BYTES element 0 declares 9 bytes"),
        (raw(8, "BYTES", [1, 1 << 19]), bytes(8), "do not fit in 8 bytes"),
    ],
)
def test_binary_sizes_that_lie(body: Any, tail: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decode(body, tail)


@pytest.mark.parametrize(
    ("default", "own", "expected"),
    [(None, None, False), (True, None, True), (None, True, True), (True, False, False), (False, True, True)],
)
def test_which_outputs_are_binary(default: bool | None, own: bool | None, expected: bool) -> None:
    body = tensor()
    body["outputs"] = [{"name": "y", "parameters": {} if own is None else {"binary_data": own}}]
    if default is not None:
        body["parameters"] = {"binary_data_output": default, "kept": 3}
    request, form = DECODE(described(), json.dumps(body).encode(), None)
    assert request.outputs == ("y",)
    assert ("y" in form.binary) is expected
    assert request.parameters == ({} if default is None else {"kept": 3})


def test_a_header_that_lies_about_the_json() -> None:
    with pytest.raises(InvalidArgument, match="Length is 99, but the body has only 2 bytes"):
        DECODE(described(), b"{}", 99)


def test_all_or_none_of_the_outputs_are_told_apart_by_identity() -> None:
    body = tensor() | {"outputs": [{"name": name, "parameters": {"binary_data": True}} for name in "yz"]}
    assert DECODE(described(), json.dumps(body).encode(), None)[1].binary is ALL
    assert DECODE(described(), json.dumps(tensor() | {"outputs": [{"name": "y"}]}).encode(), None)[1].binary is NONE


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (with_output(classification=-1), "'classification' must be"),
        (with_output(classification="2"), "'classification' must be"),
        (with_output(classification=2, shared_memory_region="r", shared_memory_byte_size=8), "with classification"),
        (with_output(shared_memory_region=3, shared_memory_byte_size=8), "must be a name"),
        (with_output(shared_memory_region="r"), "'shared_memory_byte_size' must be a whole number"),
        (in_region(shared_memory_region="r", shared_memory_byte_size=8, binary_data_size=8), "must set only one"),
        (
            in_region(shared_memory_region="r", shared_memory_byte_size=4),
            "Expected 8, got 4 in shared memory",
        ),
        (
            in_region(shared_memory_region="r", shared_memory_byte_size=8, shared_memory_offset=-1),
            "'shared_memory_offset' must",
        ),
        ({"inputs": [*raw(8)["inputs"], *tensor()["inputs"]]}, "input 'x' already exists in request"),
        ({"inputs": raw(8)["inputs"] * 2}, "input 'x' already exists in request"),
    ],
)
def test_forms_that_are_refused(body: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decode(body)


@pytest.mark.parametrize(
    "body",
    [
        in_region(shared_memory_region="r", shared_memory_byte_size=8),
        with_output(shared_memory_region="r", shared_memory_byte_size=8),
    ],
)
def test_regions_must_be_known(body: Any) -> None:
    with pytest.raises(NotFound, match="'r'"):
        decode(body)


def test_what_is_in_shared_memory_is_read_anew_for_each_request() -> None:
    path = Path("/dev/shm/penstock-test-decoder")
    path.write_bytes(bytes(8))
    memory = SharedMemory(enabled=True)
    memory.register("r", path.name, 0, 8)
    decode_shared = HttpRequestDecoder(memory)
    text = json.dumps(in_region(shared_memory_region="r", shared_memory_byte_size=8)).encode()
    for values in ([1.0, 2.0], [3.0, 4.0]):
        path.write_bytes(np.array(values, np.float32).tobytes())
        request, form = decode_shared(described(), text, None)
        assert request.inputs["x"].tolist() == values
        assert form.lease is not None
        form.release()
    memory.close()
    path.unlink()
    with pytest.raises(NotFound):
        decode_shared(described(), text, None)


def test_classification_is_passed_on_and_zero_is_none() -> None:
    assert DECODE(described(), json.dumps(with_output(classification=3)).encode(), None)[1].classification == {"y": 3}
    assert DECODE(described(), json.dumps(with_output(classification=0)).encode(), None)[1].classification == {}


def test_parameters_of_every_kind_are_passed_on() -> None:
    parameters = {"sequence_id": 2**64 - 1, "text": "t", "flag": True, "share": 0.5, "timeout": 3}
    assert decode({**tensor(), "parameters": parameters}).parameters == parameters
    assert decode({**tensor(), "id": "7"}).id == "7"


def test_bool_bytes_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="BOOL"):
        decode(raw(2, "BOOL"), b"\x00\x02")
    assert decode(raw(2, "BOOL"), b"\x00\x01").inputs["x"].tolist() == [False, True]


def decode_raw(spec: TensorSpec, body: bytes) -> InferRequest:
    return HttpRequestDecoder(SharedMemory(enabled=False))(described(spec), body, 0)[0]


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [((-1, 3), 24, (2, 3)), ((-1, -1), 12, (1, 3)), ((2, 3), 24, (2, 3)), ((3, -1), 24, (3, 2)), ((), 4, ())],
)
def test_a_raw_request_is_the_only_input(shape: tuple[int, ...], size: int, expected: tuple[int, ...]) -> None:
    body = np.arange(size // 4, dtype=np.float32).tobytes()
    request = decode_raw(TensorSpec("x", DataType.FP32, shape), body)
    assert request.inputs["x"].shape == expected
    assert request.inputs["x"].tobytes() == body


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        ((-1, 3), 16, "cannot have 16 bytes"),
        ((2, 3), 16, "cannot have 16 bytes"),
        ((3, -1, -1), 24, "cannot be deduced"),
        ((0, -1), 4, "cannot have 4 bytes"),
    ],
)
def test_raw_requests_of_the_wrong_size(shape: tuple[int, ...], size: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decode_raw(TensorSpec("x", DataType.FP32, shape), bytes(size))


def test_a_raw_request_of_text_is_one_element() -> None:
    request = decode_raw(TensorSpec("x", DataType.BYTES, (-1, 1)), b"\xffany\0thing")
    assert request.inputs["x"].tolist() == [[b"\xffany\0thing"]]
    with pytest.raises(InvalidArgument, match="more than one BYTES element"):
        decode_raw(TensorSpec("x", DataType.BYTES, (-1, 2)), b"a")
    with pytest.raises(InvalidArgument, match="has 0"):
        DECODE(described(), b"abc", 0)


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(0, 200)))
def test_any_bytes_are_decoded_or_refused(body: bytes, json_length: int | None) -> None:
    try:
        request, form = DECODE(described(), body, json_length)
    except InvalidArgument:
        return
    form.release()
    assert isinstance(request, InferRequest)
