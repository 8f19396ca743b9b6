from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer_requests import (
    AN_EMPTY_GROUP,
    TYPED,
    describe,
    field,
    parse,
    raw_request,
    tensors,
    typed_request,
    wire_messages,
)
from penstock.errors import Code, InvalidArgument, PenstockError
from penstock.online.server.answer_form import TEXT, AnswerForm
from penstock.online.server.grpc.decoder import GrpcRequestDecoder, check_version, request_id
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.protocol import messages
from penstock.request import MAX_BYTES_ELEMENTS, InferRequest
from penstock.tensor import DataType, to_wire


def decoder() -> GrpcRequestDecoder:
    return GrpcRequestDecoder(SharedMemory(enabled=False))


def decode(message: Any) -> InferRequest:
    return decoder()(message.SerializeToString())[0]


def assert_same(got: InferRequest, given_arrays: list[np.ndarray]) -> None:
    assert list(got.inputs) == [f"x{n}" for n in range(len(given_arrays))]
    for array, want in zip(got.inputs.values(), given_arrays, strict=True):
        assert (array.dtype, array.shape) == (want.dtype, want.shape)
        assert bytes(to_wire(array)) == bytes(to_wire(want))


@given(st.lists(tensors(list(DataType)), max_size=3), st.text())
def test_raw_tensors_come_out_as_they_went_in(given_arrays: list[np.ndarray], identity: str) -> None:
    decode, data = decoder(), raw_request(given_arrays, id=identity).SerializeToString()
    for _ in range(2):  # once as new, once as known
        request, form = decode(data)
        assert_same(request, given_arrays)
        assert (request.model_name, request.id, form) == ("m", identity, TEXT)


def test_tensors_have_up_to_64_dimensions() -> None:
    for made in (raw_request, typed_request):
        array = np.ones((1,) * 64, np.float32)
        assert_same(decode(made([array])), [array])
        message = made([array])
        message.inputs[0].shape.append(1)
        with pytest.raises(InvalidArgument, match="a shape of 65 dimensions exceeds the limit of 64 dimensions"):
            decode(message)


@given(st.lists(tensors(list(TYPED)), max_size=3))
def test_typed_contents_come_out_as_they_went_in(given_arrays: list[np.ndarray]) -> None:
    assert_same(decode(typed_request(given_arrays)), given_arrays)


@given(tensors([DataType.INT32, DataType.FP32, DataType.BOOL, DataType.UINT64]))
def test_typed_contents_may_come_in_pieces_of_either_kind(array: np.ndarray) -> None:
    first, second = typed_request([array.ravel()[: array.size // 2]]), typed_request([array.ravel()[array.size // 2 :]])
    tensor = describe("x0", array)
    # The lists of a repeated field are concatenated.
    pieces = [tensor.SerializeToString()]
    for piece in (first, second):
        contents = piece.inputs[0].contents.SerializeToString()
        pieces.append(field(5, contents))
    body = b"".join(pieces)
    assert_same(decoder()(b"\x0a\x01m" + field(5, body))[0], [array])


def test_unpacked_contents_and_unknown_fields_within_them_are_read() -> None:
    contents = b"\x08\x01" + b"\x0a\x01\x00" + b"\x08\x01" + b"\xa2\x06\x03abc"
    tensor = field(1, b"x0") + field(2, b"BOOL") + b"\x18\x03" + field(5, contents)
    request = decoder()(field(1, b"m") + field(5, tensor))[0]
    np.testing.assert_array_equal(request.inputs["x0"], [True, False, True])


def test_large_raw_tensors_are_views_of_the_message() -> None:
    array = np.arange(10_000, dtype=np.float32)
    data = raw_request([array], id="7").SerializeToString()
    for received in (data, bytearray(data), memoryview(data)):
        got = decoder()(received)[0].inputs["x0"]
        assert np.shares_memory(got, np.frombuffer(received, np.uint8))


def test_everything_of_a_request_is_read() -> None:
    message = raw_request([np.zeros(2, np.float32)], id="7", model_version="3")
    message.outputs.add(name="y")
    message.outputs.add(name="z").parameters["classification"].int64_param = 2
    for name, kind, value in (
        ("flag", "bool_param", True),
        ("count", "int64_param", -5),
        ("huge", "uint64_param", 2**64 - 1),
        ("ratio", "double_param", 0.5),
        ("text", "string_param", "π"),
    ):
        setattr(message.parameters[name], kind, value)
    request, form = decoder()(message.SerializeToString())
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "7")
    assert request.outputs == ("y", "z")
    assert request.parameters == {"flag": True, "count": -5, "huge": 2**64 - 1, "ratio": 0.5, "text": "π"}
    assert form == AnswerForm(classification={"z": 2})


# Refused requests


def changed(**fields: Any) -> Any:
    """One raw input of shape (2,), with further fields of that input."""
    message = raw_request([np.zeros(2, np.float32)])
    for name, value in fields.items():
        if isinstance(value, list):
            del message.inputs[0].shape[:]
            message.inputs[0].shape.extend(value)
        else:
            setattr(message.inputs[0], name, value)
    return message


def with_raw(content: bytes, datatype: str = "FP32", *more: bytes) -> Any:
    message = changed(datatype=datatype)
    message.raw_input_contents[:] = [content, *more]
    return message


def typed(datatype: str, contents: dict[str, Any]) -> Any:
    message = changed(datatype=datatype)
    del message.raw_input_contents[:]
    message.inputs[0].contents.MergeFrom(messages.InferTensorContents(**contents))
    return message


def with_output(**parameters: Any) -> Any:
    message = messages.ModelInferRequest(model_name="m")
    output = message.outputs.add(name="y")
    for name, value in parameters.items():
        setattr(output.parameters[name], "string_param" if isinstance(value, str) else "int64_param", value)
    return message


def twice(field_name: str) -> Any:
    message = messages.ModelInferRequest(model_name="m")
    for _ in range(2):
        getattr(message, field_name).add(name="x").MergeFrom(
            messages.ModelInferRequest.InferInputTensor(datatype="FP32")
            if field_name == "inputs"
            else with_output().outputs[0]
        )
    return message


def mixed() -> Any:
    message = typed("FP32", {"fp32_contents": [1]})
    message.raw_input_contents.append(bytes(8))
    return message


def parameter_without_value() -> Any:
    message = messages.ModelInferRequest(model_name="m")
    message.parameters["odd"].SetInParent()
    return message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (changed(datatype="FP33"), "invalid datatype for input x0: 'FP33'"),
        (changed(datatype="fp32"), "invalid datatype"),
        (changed(shape=[-1]), "negative dimension"),
        (changed(shape=[1, 1 << 60]), "too large"),
        (changed(shape=[1 << 40] * 3), "too large"),
        (changed(shape=[0, 1 << 62, 4]), "too large"),
        (changed(shape=[1] * 65), "exceeds the limit of 64"),
        (changed(shape=[3]), "input byte size mismatch for input 'x0' for model 'm'. Expected 12, got 8"),
        (with_raw(bytes(7)), "Expected 8, got 7"),
        (with_raw(b""), "Expected 8, got 0"),
        (with_raw(bytes(8), "FP32", bytes(8)), "does not match the number of raw_input_contents (2) for model 'm'"),
        (with_raw(b"\x02\x00", "BOOL"), "must be the byte 0 or 1"),
        (
            with_raw(b"\x09\x00\x00\x00abc" + bytes(4), "BYTES"),
            "input 'x0' for model 'm': BYTES element 0 declares 9 bytes",
        ),
        (with_raw(b"\xff\xff\xff\xff" + bytes(4), "BYTES"), "declares 4294967295 bytes"),
        (with_raw(bytes(9), "BYTES"), "left over"),
        (with_raw(bytes(7), "BYTES"), "do not fit"),
        (
            typed("INT32", {"fp32_contents": [1, 2]}),
            "unexpected explicit tensor data for input tensor 'x0' for model 'm'",
        ),
        (typed("FP32", {"fp32_contents": [1, 2], "int_contents": [1]}), "'int_contents', expected 'fp32_contents'"),
        (typed("FP32", {"fp32_contents": [1]}), "needs 2 elements, but 'fp32_contents' has 1"),
        (typed("FP32", {}), "needs 2 elements, but 'fp32_contents' has 0"),
        (typed("FP16", {"fp32_contents": [1, 2]}), "FP16 has no typed contents"),
        (typed("BF16", {"fp32_contents": [1, 2]}), "BF16 has no typed contents"),
        (typed("INT8", {"int_contents": [1, 128]}), "do not fit INT8"),
        (typed("UINT16", {"uint_contents": [1, 1 << 16]}), "do not fit UINT16"),
        (mixed(), "contents field must not be specified when using raw_input_contents for 'x0' for model 'm'"),
        (twice("inputs"), "input 'x' already exists in request"),
        (twice("outputs"), "an output is requested twice"),
        (with_output(classification=0), "'classification' must be at least 1"),
        (with_output(classification="many"), "'classification' must be a whole number"),
        (with_output(classification=1, shared_memory_region="r", shared_memory_byte_size=1), "with classification"),
        (with_output(shared_memory_region=1, shared_memory_byte_size=1), "must be a name"),
        (with_output(shared_memory_region="r"), "'shared_memory_byte_size' must be a whole number"),
        (with_output(shared_memory_region="r", shared_memory_byte_size=-1), "must be a whole number"),
        (parameter_without_value(), "parameter 'odd' has invalid type"),
        (messages.ModelInferRequest(model_name="m", model_version="one"), "version string 'one'"),
        (messages.ModelInferRequest(model_name="m", model_version="-1"), "integral value > 0"),
        (messages.ModelInferRequest(model_name="m", model_version="9" * 30), "integral value > 0"),
    ],
)
def test_what_is_wrong_is_told(message: Any, words: str) -> None:
    for data in (message.SerializeToString(), message.SerializeToString() + AN_EMPTY_GROUP):
        with pytest.raises(InvalidArgument) as caught:
            decoder()(data)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\x05m",
        b"\xff",
        b"\x0a\x01\xff",
        b"\x1a\x01\xff",
        b"\x1a\x01\xff\x1a\x01a",
        b"\x02\x00",
        b"\x2a\x01\x0a",
    ],
)
def test_malformed_messages_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="not a ModelInferRequest"):
        decoder()(data)
    assert request_id(data) == ""


def test_a_message_of_countless_parts_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="more than 4096 fields"):
        decoder()(b"\x2a\x00" * 10_000)
    assert request_id(b"\x2a\x00" * 10_000) == ""
    with pytest.raises(InvalidArgument, match="not a ModelInferRequest"):
        decoder()(AN_EMPTY_GROUP + b"\x2a\x00" * (1 << 20))


def test_bytes_elements_are_bounded_in_number() -> None:
    """The limit applies to all tensors together, and is checked before any tensor is read."""
    message = messages.ModelInferRequest(model_name="m")
    for name, count in (("x", MAX_BYTES_ELEMENTS), ("y", 0)):
        message.inputs.add(name=name, datatype="BYTES", shape=[count])
    message.raw_input_contents.extend([bytes(4 * MAX_BYTES_ELEMENTS), b""])
    assert decode(message).inputs["x"].shape == (MAX_BYTES_ELEMENTS,)
    message.inputs[1].shape[0] = 1
    with pytest.raises(InvalidArgument, match="1048577 BYTES elements exceed the limit of 1048576"):
        decode(message)


def test_parameters_are_bounded_in_number() -> None:
    message = messages.ModelInferRequest(model_name="m")
    for number in range(1025):
        message.parameters[str(number)].int64_param = number
    with pytest.raises(InvalidArgument, match="1025 parameters exceed the limit of 1024"):
        decode(message)
    del message.parameters["7"]
    assert len(decode(message).parameters) == 1024


def test_the_id_of_a_refused_request_is_found() -> None:
    assert request_id(changed(datatype="odd").SerializeToString() + b"\x1a\x017") == "7"


def test_versions_are_numbers_or_empty() -> None:
    assert check_version("m", "") == ""
    assert check_version("m", "12") == "12"
    with pytest.raises(InvalidArgument):
        check_version("m", "１")  # a digit, but not an ASCII digit


# Shared memory


class Recorded:
    """Shared memory that returns an array and records whether it is in use."""

    def __init__(self, fails: bool = False) -> None:
        self.leased = 0
        self.asked: list[Any] = []
        self.placements: dict[str, Any] = {}
        self._fails = fails

    def lease(self) -> Any:
        self.leased += 1
        return self

    def array(self, *asked: Any) -> np.ndarray:
        self.asked.append(asked)
        return np.zeros(2, np.float32)

    def place(self, output: str, *asked: Any) -> None:
        if self._fails:
            raise InvalidArgument("no room")
        self.placements[output] = asked

    def release(self) -> None:
        self.leased -= 1


def in_shared_memory(tensor: Any, region: str, offset: int, size: int) -> None:
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_offset"].int64_param = offset
    tensor.parameters["shared_memory_byte_size"].int64_param = size


def shared_request() -> Any:
    message = raw_request([np.ones(1, np.float32)] * 3)
    del message.raw_input_contents[1]
    in_shared_memory(message.inputs[1], "in", 4, 4)
    in_shared_memory(message.outputs.add(name="y"), "out", 0, 9)
    return message


def test_raw_contents_skip_inputs_in_shared_memory() -> None:
    memory = Recorded()
    request, form = GrpcRequestDecoder(memory)(shared_request().SerializeToString())  # type: ignore[arg-type]
    assert list(request.inputs["x0"]) == list(request.inputs["x2"]) == [1]
    assert memory.asked == [("in", 4, 4, DataType.FP32, (1,))]
    assert form.placements == {"y": ("out", 0, 9)}
    assert memory.leased == 1
    form.release()
    assert memory.leased == 0


def test_a_lease_is_released_when_the_request_is_refused() -> None:
    memory = Recorded(fails=True)
    with pytest.raises(InvalidArgument, match="no room"):
        GrpcRequestDecoder(memory)(shared_request().SerializeToString())  # type: ignore[arg-type]
    assert memory.leased == 0


def test_an_input_in_shared_memory_has_no_contents_and_its_size() -> None:
    message = shared_request()
    message.inputs[1].contents.fp32_contents.append(1)
    with pytest.raises(InvalidArgument, match="unexpected 'content' provided when using shared memory"):
        decode(message)
    message = shared_request()
    in_shared_memory(message.inputs[1], "in", 0, 5)
    with pytest.raises(InvalidArgument, match="Expected 4, got 5 in shared memory"):
        decode(message)
    with pytest.raises(PenstockError) as caught:
        decode(shared_request())
    assert caught.value.code is Code.UNIMPLEMENTED


# The parser and the protobuf class agree


@given(wire_messages(), wire_messages(), st.data())
def test_what_is_remembered_never_changes_what_is_read(known: bytes, data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, max(0, len(known) - 1)))
    similar = known[:at] + draw.draw(st.binary(min_size=1, max_size=1)) + known[at + 1 :]
    decode = decoder()
    for message in (known, data, known, similar, known, data):
        assert outcome(message, decode) == outcome(message, decoder())


def outcome(data: bytes, decode: GrpcRequestDecoder) -> Any:
    try:
        request, form = decode(data)
    except InvalidArgument as error:
        return str(error).split(":")[0]
    inputs = {name: (array.dtype, array.shape, bytes(to_wire(array))) for name, array in request.inputs.items()}
    return request.model_name, request.id, inputs, request.parameters, request.outputs, form


@given(wire_messages())
def test_the_walk_and_the_protobuf_class_decide_alike(data: bytes) -> None:
    if parse(data) is None:
        with pytest.raises(InvalidArgument):
            decoder()(data)
    else:
        assert outcome(data, decoder()) == outcome(data + AN_EMPTY_GROUP, decoder())
