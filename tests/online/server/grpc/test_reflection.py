import pytest

from calls import FakeCall
from penstock.errors import Code, Unavailable
from penstock.online.server.grpc.reflection import VERSIONS, Reflection
from penstock.protocol import messages


@pytest.mark.parametrize("package", VERSIONS)
def test_each_message_has_its_answer_until_half_close(package: str) -> None:
    call, ended = FakeCall(), []
    reflection = Reflection(call, package, ["a.B"], ended.append)
    kind = messages.message(f"{package}.ServerReflectionRequest")
    for symbol in ("inference.ModelInferRequest", "inference.ModelInferRequest.id", "absent", ""):
        reflection.message(kind(host="here", file_containing_symbol=symbol).SerializeToString())
    reflection.half_close()
    answers = [messages.message(f"{package}.ServerReflectionResponse").FromString(data) for data in call.sent]
    assert [answer.WhichOneof("message_response") for answer in answers] == [
        "file_descriptor_response",
        "file_descriptor_response",
        "error_response",
        "error_response",
    ]
    assert {answer.valid_host for answer in answers} == {"here"}
    assert (call.ended, call.error, ended) == (True, None, [reflection])


def test_what_is_no_message_ends_the_call() -> None:
    call, ended = FakeCall(), []
    Reflection(call, VERSIONS[0], [], ended.append).message(b"\xff")
    assert call.error is not None
    assert call.error.code is Code.INVALID_ARGUMENT
    assert len(ended) == 1


def test_it_ends_with_the_server_and_with_its_client() -> None:
    for end in ("drain", "cancel"):
        call, ended = FakeCall(), []
        reflection = Reflection(call, VERSIONS[0], [], ended.append)
        if end == "drain":
            reflection.drain(Unavailable("stopping"))
            assert str(call.error) == "stopping"
        else:
            call.cancel()
        assert ended == [reflection]


def test_a_request_that_the_answer_would_repeat_is_bounded() -> None:
    call, ended = FakeCall(), []
    kind = messages.message(f"{VERSIONS[0]}.ServerReflectionRequest")
    Reflection(call, VERSIONS[0], [], ended.append).message(kind(host="h" * 2000).SerializeToString())
    assert call.sent == []
    assert call.error is not None
    assert call.error.code is Code.INVALID_ARGUMENT
