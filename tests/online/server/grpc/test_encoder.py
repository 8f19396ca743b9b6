from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tritonclient.grpc import InferResult, service_pb2

from penstock.errors import InvalidArgument
from penstock.online.server.answer_form import TEXT, AnswerForm
from penstock.online.server.grpc.encoder import GrpcAnswerEncoder, encode_parameters, streamed, streamed_error
from penstock.protocol import messages
from penstock.request import InferResponse
from penstock.tensor import DataType, to_wire


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray:
    datatype = draw(st.sampled_from(list(DataType)))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40))
    if datatype is DataType.BYTES:
        array = np.empty(int(np.prod(shape)), object)
        array[:] = draw(st.binary(max_size=9))
        return array.reshape(shape)
    array = np.arange(np.prod(shape)).reshape(shape) % 7
    return np.asfortranarray(array.astype(datatype.dtype)) if draw(st.booleans()) else array.astype(datatype.dtype)


def written(response: InferResponse, form: AnswerForm = TEXT) -> Any:
    return messages.ModelInferResponse.FromString(b"".join(GrpcAnswerEncoder()(response, form)))


PARAMETERS = st.dictionaries(
    st.text(max_size=5),
    st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(max_size=5)),
    max_size=3,
)


@given(st.lists(tensors(), max_size=4), st.text(), st.text(max_size=5), PARAMETERS)
def test_what_is_written_is_what_the_protobuf_class_would_write(
    given_arrays: list[np.ndarray], identity: str, name: str, parameters: dict[str, Any]
) -> None:
    outputs = {f"{name}{n}": array for n, array in enumerate(given_arrays)}
    expected = messages.ModelInferResponse(model_name=name, model_version="1", id=identity)
    expected.MergeFromString(encode_parameters(parameters))
    for output, array in outputs.items():
        datatype = DataType.from_numpy(array.dtype).value
        expected.outputs.add(name=output, datatype=datatype, shape=array.shape)
        expected.raw_output_contents.append(bytes(to_wire(array)))
    encode = GrpcAnswerEncoder()
    for _ in range(2):  # once as new, once as known
        parts = encode(InferResponse(name, "1", outputs, identity, parameters), TEXT)
        assert messages.ModelInferResponse.FromString(b"".join(parts)) == expected
        whole = messages.ModelStreamInferResponse.FromString(b"".join(streamed(parts)))
        assert whole == messages.ModelStreamInferResponse(infer_response=expected)


@given(PARAMETERS)
def test_parameters_keep_value_and_kind(parameters: dict[str, Any]) -> None:
    read = messages.ModelInferResponse.FromString(encode_parameters(parameters)).parameters
    found = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in read.items()}
    assert found == parameters
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in parameters.items()}


def test_other_values_of_parameters_become_text() -> None:
    read = messages.ModelInferResponse.FromString(encode_parameters({"list": [1], "huge": 1 << 70})).parameters
    assert (read["list"].string_param, read["huge"].string_param) == ("[1]", str(1 << 70))


def test_large_tensors_are_not_copied_and_small_ones_travel_together() -> None:
    big, small = np.zeros(5000, np.float32), np.zeros(5, np.float32)
    parts = GrpcAnswerEncoder()(InferResponse("m", "1", {"a": small, "b": big, "c": small, "d": small}), TEXT)
    assert [len(part) for part in parts[1:]] == [20_000, 2 * 22]
    assert np.shares_memory(np.frombuffer(parts[1], np.float32), big)


def test_big_endian_arrays_are_turned_round() -> None:
    for dtype, count in ((">f4", 3), (">f4", 5000)):
        array = np.arange(count, dtype=dtype)
        assert written(InferResponse("m", "1", {"y": array})).raw_output_contents[0] == array.astype("<f4").tobytes()


class Place:
    def __init__(self, size: int) -> None:
        self.written = b""
        self._size = size

    def write(self, array: np.ndarray) -> int:
        if array.nbytes > self._size:
            raise InvalidArgument("too small")
        self.written = array.tobytes()
        return array.nbytes


def test_outputs_in_shared_memory_leave_an_empty_entry() -> None:
    place, array = Place(8), np.arange(2, dtype=np.float32)
    response = InferResponse("m", "1", {"a": array, "b": array, "c": array})
    answer = written(response, AnswerForm(placements={"b": place}))  # type: ignore[dict-item]
    assert [len(raw) for raw in answer.raw_output_contents] == [8, 0, 8]
    assert [list(output.shape) for output in answer.outputs] == [[2]] * 3
    assert place.written == array.tobytes()
    result = InferResult(service_pb2.ModelInferResponse.FromString(answer.SerializeToString()))
    np.testing.assert_array_equal(result.as_numpy("c"), array)
    with pytest.raises(InvalidArgument, match="too small"):
        written(response, AnswerForm(placements={"b": Place(7)}))  # type: ignore[dict-item]


def test_errors_on_a_stream_name_their_request() -> None:
    answer = messages.ModelStreamInferResponse.FromString(streamed_error(InvalidArgument("no", "do"), "7"))
    assert (answer.error_message, answer.infer_response.id) == ("no (do)", "7")


def test_memory_of_what_was_written_is_bounded() -> None:
    encode = GrpcAnswerEncoder()
    for n in range(2000):
        encode(InferResponse(f"m{n}", "1", {f"y{n}": np.zeros(1)}), TEXT)
    assert len(encode._heads) <= 1024
    assert len(encode._described) <= 1024
