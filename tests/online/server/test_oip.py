import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.errors import InvalidArgument, Unsupported
from penstock.online.server import oip
from penstock.request import InferRequest, InferResponse
from penstock.tensor import DataType, to_wire

JSON_TYPES = [datatype for datatype in DataType if datatype not in (DataType.FP16, DataType.BF16)]


def decode(body: Any, tail: bytes | None = None) -> InferRequest:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return oip.decode_infer("m", "", text + (tail or b""), None if tail is None else len(text))[0]


def tensor(datatype: str = "FP32", shape: Any = (2,), data: Any = (1, 2), **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data, **more}]}


def raw(size: Any, datatype: str = "FP32", shape: Any = (2,)) -> dict[str, Any]:
    made = tensor(datatype, shape, parameters={"binary_data_size": size})
    del made["inputs"][0]["data"]
    return made


@st.composite
def tensors(draw: st.DrawFn, among: list[DataType]) -> np.ndarray:
    datatype = draw(st.sampled_from(among))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    if datatype is DataType.BYTES:
        texts = draw(st.lists(st.text().map(str.encode), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        array = np.empty(len(texts), object)
        array[:] = texts
        return array.reshape(shape)
    if datatype in (DataType.FP16, DataType.BF16):
        return draw(arrays.arrays(np.float32, shape, elements=st.floats(-9, 9, width=32))).astype(datatype.dtype)
    return draw(arrays.arrays(datatype.dtype, shape))


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


@given(tensors(JSON_TYPES), st.booleans())
def test_answers_in_json_can_be_sent_back(array: np.ndarray, nested: bool) -> None:
    length, body = oip.encode_infer(InferResponse("m", "1", {"x": array}, "id"), oip.NONE)
    assert length is None
    (output,) = json.loads(body)["outputs"]
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        np.testing.assert_array_equal(np.array(output["data"], array.dtype), array.ravel())
        return
    if nested and array.ndim and array.dtype.kind != "O" and array.size:
        output["data"] = array.tolist()
    got = decode({"inputs": [output]}).inputs["x"]
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(got, array)


@given(tensors(list(DataType)))
def test_binary_answers_name_their_sizes(array: np.ndarray) -> None:
    length, body = oip.encode_infer(InferResponse("m", "1", {"y": array}), oip.ALL)
    assert length is not None
    answer = json.loads(body[:length])
    assert answer["outputs"][0]["parameters"]["binary_data_size"] == len(body) - length
    assert body[length:] == bytes(to_wire(array))


def test_binary_arrays_are_views_of_the_body() -> None:
    text = json.dumps(raw(8)).encode()
    body = text + bytes(8)
    request, _ = oip.decode_infer("m", "", body, len(text))
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
        (tensor(shape=[2] * 40), "length <= 32"),
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
        (raw(8), "not the header Inference-Header-Content-Length"),
        (tensor(parameters={"binary_data_size": 8}), "must set only one of the following fields"),
        (raw("8"), "must be a number of bytes"),
        (raw(True), "must be a number of bytes"),
        (raw(-8), "must be a number of bytes"),
        ({**tensor(), "parameters": {"triton_x": 1}}, "reserved"),
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
        (raw(8, "BYTES"), b"\x09\0\0\0abcd", "BYTES element 0 says it has 9 bytes"),
        (raw(8, "BYTES", [1, 1 << 40]), bytes(8), "do not fit in 8 bytes"),
    ],
)
def test_binary_sizes_that_lie(body: Any, tail: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decode(body, tail)


def test_a_header_that_lies_about_the_json() -> None:
    with pytest.raises(InvalidArgument, match="said to have 99 bytes, but the body has 2"):
        oip.decode_infer("m", "", b"{}", 99)
    with pytest.raises(Unsupported, match="raw binary request"):
        oip.decode_infer("m", "", b"1234", 0)
    with pytest.raises(Unsupported, match="shared memory"):
        decode(tensor(parameters={"shared_memory_region": "r"}))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"classification": 3}, "classification is not supported"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": 8}, "output 'y' in shared memory"),
    ],
)
def test_outputs_in_a_form_that_is_not_supported(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        decode(tensor() | {"outputs": [{"name": "y", "parameters": parameters}]})


@pytest.mark.parametrize(
    ("default", "own", "expected"),
    [(None, None, False), (True, None, True), (None, True, True), (True, False, False), (False, True, True)],
)
def test_which_outputs_are_binary(default: bool | None, own: bool | None, expected: bool) -> None:
    body = tensor()
    body["outputs"] = [{"name": "y", "parameters": {} if own is None else {"binary_data": own}}]
    if default is not None:
        body["parameters"] = {"binary_data_output": default, "kept": 3}
    request, binary = oip.decode_infer("m", "", json.dumps(body).encode(), None)
    assert request.outputs == ("y",)
    assert ("y" in binary) is expected
    assert request.parameters == ({} if default is None else {"kept": 3})


def test_an_answer_in_full() -> None:
    outputs = {"y": np.array([[1.5, np.nan], [np.inf, -np.inf]], np.float32), "n": np.arange(3, dtype=np.int64)[::2]}
    _, body = oip.encode_infer(InferResponse("m", "1", outputs, 'a"b'), oip.NONE)
    assert body == (
        b'{"id":"a\\"b","model_name":"m","model_version":"1","outputs":['
        b'{"name":"y","datatype":"FP32","shape":[2,2],"data":[1.5,NaN,Infinity,-Infinity]},'
        b'{"name":"n","datatype":"INT64","shape":[2],"data":[0,2]}]}'
    )
    _, body = oip.encode_infer(InferResponse("m", "1", {}), oip.NONE)
    assert body == b'{"model_name":"m","model_version":"1","outputs":[]}'


@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.BF16])
def test_halves_are_answered_in_binary_only(datatype: DataType) -> None:
    with pytest.raises(InvalidArgument, match=f"{datatype.value} has no JSON form"):
        oip.encode_infer(InferResponse("m", "1", {"y": np.zeros(2, datatype.dtype)}), oip.NONE)


def test_bytes_that_are_not_text_are_answered_in_binary_only() -> None:
    with pytest.raises(InvalidArgument, match="not text"):
        oip.encode_infer(InferResponse("m", "1", {"y": np.array([b"\xff"], object)}), oip.NONE)
