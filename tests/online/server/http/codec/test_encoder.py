import json

import numpy as np
import pytest
from hypothesis import given

from penstock.errors import InvalidArgument
from penstock.online.server.answer_form import BINARY, TEXT, AnswerForm
from penstock.online.server.http.codec.encoder import HttpAnswerEncoder
from penstock.request import InferResponse
from penstock.tensor import DataType, to_wire
from tensors import tensors

ENCODE = HttpAnswerEncoder()


@given(tensors(list(DataType)))
def test_binary_answers_name_their_sizes(array: np.ndarray) -> None:
    for identity in ("", "7"):
        headers, text, tensors = ENCODE(InferResponse("m", "1", {"y": array}, identity), BINARY)
        body = b"".join([text, *tensors])
        length = int(headers.rpartition(b": ")[2])
        answer = json.loads(body[:length])
        assert answer["outputs"][0]["parameters"]["binary_data_size"] == len(body) - length
        assert body[length:] == bytes(to_wire(array))


def test_an_answer_in_full() -> None:
    outputs = {"y": np.array([[1.5, np.nan], [np.inf, -np.inf]], np.float32), "n": np.arange(3, dtype=np.int64)[::2]}
    _, body, _ = ENCODE(InferResponse("m", "1", outputs, 'a"b'), TEXT)
    assert body == (
        b'{"id":"a\\"b","model_name":"m","model_version":"1","outputs":['
        b'{"name":"y","datatype":"FP32","shape":[2,2],"data":[1.5,NaN,Infinity,-Infinity]},'
        b'{"name":"n","datatype":"INT64","shape":[2],"data":[0,2]}]}'
    )
    _, body, _ = ENCODE(InferResponse("m", "1", {}), TEXT)
    assert body == b'{"model_name":"m","model_version":"1","outputs":[]}'


@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.BF16])
def test_halves_are_answered_in_binary_only(datatype: DataType) -> None:
    with pytest.raises(InvalidArgument, match=f"{datatype.value} has no JSON form"):
        ENCODE(InferResponse("m", "1", {"y": np.zeros(2, datatype.dtype)}), TEXT)


def test_bytes_that_are_not_text_are_answered_in_binary_only() -> None:
    with pytest.raises(InvalidArgument, match="not UTF-8 text"):
        ENCODE(InferResponse("m", "1", {"y": np.array([b"\xff"], object)}), TEXT)


def test_what_is_remembered_changes_nothing() -> None:
    for number in range(3):
        y, z = np.full((1, 2), number, np.float32), np.full(3, number, np.int8)
        for identity in ("", "7"):
            response = InferResponse("100%b m", "1", {"y%d": y, "z": z}, identity)
            _, text, _ = ENCODE(response, TEXT)
            answer = json.loads(text)
            assert answer.get("id", "") == identity
            assert answer["model_name"] == "100%b m"
            assert [(one["name"], one["data"]) for one in answer["outputs"]] == [
                ("y%d", [number] * 2),
                ("z", [number] * 3),
            ]
            headers, text, tensors = ENCODE(response, BINARY)
            assert b"".join([text, *tensors]).endswith(y.tobytes() + z.tobytes())
            assert b"octet-stream" in headers


def test_outputs_in_different_forms() -> None:
    y = np.array([1, 2], np.float32)
    headers, text, tensors = ENCODE(InferResponse("m", "1", {"y": y, "z": y}), AnswerForm(frozenset({"z"})))
    assert b"Inference-Header-Content-Length: %d\r\n" % len(text) in headers
    assert [one.get("data") for one in json.loads(text)["outputs"]] == [[1, 2], None]
    assert [bytes(tensor) for tensor in tensors] == [y.tobytes()]


def test_parameters_of_the_answer() -> None:
    _, text, _ = ENCODE(InferResponse("m", "1", {}, parameters={"a": 1, "b": "c"}), TEXT)
    assert json.loads(text)["parameters"] == {"a": 1, "b": "c"}


def test_large_outputs_are_not_copied() -> None:
    y = np.zeros(100_000, np.float32)
    _, _, (tensor,) = ENCODE(InferResponse("m", "1", {"y": y}), BINARY)
    assert np.shares_memory(np.frombuffer(tensor, np.uint8), y)


def test_big_endian_arrays() -> None:
    y = np.array([1, 2], ">f4")
    for array in (y, y.astype("<f4")):
        _, text, tensors = ENCODE(InferResponse("m", "1", {"y": array}), BINARY)
        assert b"".join([text, *tensors]).endswith(y.astype("<f4").tobytes())


def test_outputs_in_shared_memory_are_written_there_and_only_described() -> None:
    written = []

    class Place:
        def write(self, array: np.ndarray) -> int:
            written.append(array)
            return array.nbytes

    y = np.array([1, 2], np.float32)
    form = AnswerForm(placements={"y": Place()})  # type: ignore[dict-item]
    _, text, _ = ENCODE(InferResponse("m", "1", {"y": y}), form)
    assert json.loads(text)["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2]}]
    assert written[0] is y


def test_the_memory_of_templates_is_bounded() -> None:
    encode = HttpAnswerEncoder()
    for size in range(3000):
        encode(InferResponse("m", "1", {"y": np.zeros(size, np.int8)}), BINARY)
    assert len(encode._templates) <= 1024
