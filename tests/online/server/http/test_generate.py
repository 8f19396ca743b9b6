"""Generate and generate_stream: JSON members as tensors, events, and clients that disconnect or do not read."""

import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handles import described
from http_servers import LOOPS, PATIENCE_S, Client, GatedServer, get, infer, post
from penstock.errors import InvalidArgument, PenstockError
from penstock.online.server.http.generate import read_request, write_response
from penstock.online.server.to_thread import finish
from penstock.request import InferResponse
from penstock.tensor import Array, DataType, Signature, TensorSpec
from penstock.testing import FakeModel, FakeStreamingModel

WORDS = Signature(
    (TensorSpec("text", DataType.BYTES, (-1, 1)), TensorSpec("count", DataType.INT32, (-1, 1))),
    (TensorSpec("word", DataType.BYTES, (-1, 1)),),
)
INPUTS = [
    TensorSpec("text", DataType.BYTES, (-1, 1)),
    TensorSpec("x", DataType.FP32, (-1, 3)),
    TensorSpec("n", DataType.INT64, ()),
]


def speak(inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Yields the text ``count`` times, then raises an error if the text is ``fail``."""
    text = inputs["text"][0, 0]
    for _ in range(int(inputs["count"][0, 0])):
        yield {"word": inputs["text"]}
    if text == b"fail":
        raise PenstockError("out of words")


def generate(text: str, count: int, route: str = "generate", headers: str = "", **more: Any) -> bytes:
    body = json.dumps({"text": text, "count": count, **more}).encode()
    return post(body, headers, f"/v2/models/speaker/{route}")


def stream(text: str, count: int, headers: str = "") -> bytes:
    return generate(text, count, "generate_stream", headers)


def events(body: bytes) -> list[dict[str, Any]]:
    assert not body or body.endswith(b"\n\n")
    return [json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n")[:-1]]


@pytest.fixture(scope="module", params=sorted(LOOPS))
def server(request: pytest.FixtureRequest) -> Iterator[GatedServer]:
    with GatedServer(request.param, {"speaker": FakeStreamingModel(WORDS, speak)}) as server:
        yield server


@pytest.fixture
def client(server: GatedServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client
        assert client.ask(infer(21)).data == [42, 0]


def test_parameters_and_texts_are_bounded_in_number() -> None:
    body = {"n": 1, **{f"a{n}": n for n in range(512)}, "parameters": {f"b{n}": n for n in range(512)}}
    assert len(finish(read_request(described(*INPUTS), json.dumps(body).encode())).parameters) == 1024
    with pytest.raises(InvalidArgument, match="more than 1024 parameters"):
        finish(read_request(described(*INPUTS), json.dumps(body | {"c": True}).encode()))
    with pytest.raises(InvalidArgument, match="1048577 BYTES elements exceed"):
        finish(read_request(described(*INPUTS), json.dumps({"text": [""] * ((1 << 20) + 1)}).encode()))


def test_members_become_inputs_and_parameters() -> None:
    body = b'{"text":"hi","x":[1,2,3],"n":7,"id":"a","temperature":0.5,"parameters":{"stop":true,"who":"me"}}'
    request = finish(read_request(described(*INPUTS), body))
    assert request.id == "a"
    assert request.inputs["text"].tolist() == [[b"hi"]]
    assert request.inputs["x"].tolist() == [[1, 2, 3]]
    assert request.inputs["n"].tolist() == 7
    assert request.parameters == {"temperature": 0.5, "stop": True, "who": "me"}
    assert finish(read_request(described(*INPUTS), b'{"x":[[1,2,3],[4,5,6]]}')).inputs["x"].shape == (2, 3)
    assert finish(read_request(described(*INPUTS), b'{"parameters":{"n":1}}')).inputs["n"].shape == ()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[]", "invalid generate request"),
        (b"{", "invalid generate request"),
        (b"\xff", "invalid generate request"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"unknown":[1]}', "'unknown' is not an input of model 'm'"),
        (b'{"unknown":null}', "'unknown' is not an input"),
        (b'{"id":5}', "'id' must be a string"),
        (b'{"parameters":5}', "'parameters' must be an object"),
        (b'{"n":1,"parameters":{"n":2}}', "input 'n' already exists"),
        (b'{"n":1.5}', "do not fit INT64"),
        (b'{"n":null}', "do not fit INT64"),
        (b'{"text":{}}', "do not fit BYTES"),
        (b'{"x":[[1,2],[3]]}', "needs 4 elements"),
        (b'{"x":[1,[2]]}', "do not fit FP32"),
    ],
)
def test_bodies_that_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        finish(read_request(described(*INPUTS), body))


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda one: st.lists(one, max_size=3))
)
def test_any_value_is_taken_or_refused(value: Any) -> None:
    for name in ("text", "x", "n", "other", "id", "parameters"):
        try:
            finish(read_request(described(*INPUTS), json.dumps({name: value}).encode()))
        except InvalidArgument:
            continue


def test_answers_are_members_and_one_element_has_no_brackets() -> None:
    outputs = {"a": np.array([[1.5]], np.float32), "b": np.array([1, 2], np.int8), 'c"': np.array([np.nan])}
    body = write_response(InferResponse("m", "1", outputs | {"t": np.array(["é".encode()], object)}, "7"))
    assert body == (
        b'{"id":"7","model_name":"m","model_version":"1","a":1.5,"b":[1,2],"c\\"":NaN,"t":"' + "é".encode() + b'"}'
    )


def test_a_model_that_is_not_decoupled(client: Client) -> None:
    answer = client.ask(post(b'{"x":[1,2],"id":"7"}', path="/v2/models/m/generate"))
    assert (answer.status, json.loads(answer.body)) == (
        200,
        {"id": "7", "model_name": "m", "model_version": "1", "y": [2, 4]},
    )
    answer = client.ask(post(b'{"x":[1,2]}', path="/v2/models/m/versions/1/generate_stream"))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [event["y"] for event in events(answer.body)] == [[2, 4]]


def test_exactly_one_answer_is_wanted(client: Client) -> None:
    answer = client.ask(generate("hello", 1))
    assert (answer.status, json.loads(answer.body)["word"]) == (200, "hello")
    for count in (0, 2, 50):
        refused = client.ask(generate("hello", count))
        assert refused.status == 400
        assert "exactly 1 response" in refused.error


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_stream_of_events(client: Client, count: int) -> None:
    answer = client.ask(stream("hé", count))
    assert answer.headers["transfer-encoding"] == "chunked"
    assert [event["word"] for event in events(answer.body)] == ["hé"] * count


def test_failures_before_and_in_a_stream(client: Client) -> None:
    failed = client.ask(stream("fail", 0))
    assert (failed.status, failed.error) == (500, "out of words")
    first, second, last = events(client.ask(stream("fail", 2)).body)
    assert first["word"] == second["word"] == "fail"
    assert last == {"error": "out of words"}
    assert client.ask(post(b"{", path="/v2/models/speaker/generate_stream")).status == 400
    assert client.ask(post(b"{}", path="/v2/models/absent/generate_stream")).status == 404
    assert client.ask(post(b"{}", path="/v2/models/speaker/generate")).status == 400
    assert client.ask(get("/v2/models/speaker/generate")).status == 405
    assert client.ask(generate("a", 1, headers="Inference-Header-Content-Length: 3\r\n")).status == 501


def test_a_decoupled_model_cannot_be_asked_by_infer(client: Client) -> None:
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}]}
    refused = client.ask(post(json.dumps(body).encode(), path="/v2/models/speaker/infer"))
    assert refused.status == 501
    assert "decoupled" in refused.error


def test_streams_keep_their_place_on_a_pipelined_connection(client: Client) -> None:
    client.send(infer(1) + stream("a", 3) + infer(2) + stream("b", 2) + generate("c", 1))
    assert client.read().data == [2, 0]
    assert len(events(client.read().body)) == 3
    assert client.read().data == [4, 0]
    assert len(events(client.read().body)) == 2
    assert json.loads(client.read().body)["word"] == "c"


def test_http_1_0_gets_its_events_until_the_connection_closes(server: GatedServer) -> None:
    client = server.connect()
    client.send(stream("a", 3).replace(b"HTTP/1.1", b"HTTP/1.0"))
    answer = client.read()
    assert "transfer-encoding" not in answer.headers
    assert len(events(answer.body)) == 3
    assert client.is_closed


def test_an_event_is_sent_as_soon_as_it_is_there() -> None:
    gate = threading.Semaphore(0)

    def hesitate(inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        for number in itertools.count():
            assert gate.acquire(timeout=PATIENCE_S)
            yield {"word": np.array([[b"%d" % number]], object)}

    model = FakeStreamingModel(WORDS, hesitate)
    with GatedServer(also={"speaker": model}) as server:
        client = server.connect()
        client.send(stream("a", 1))
        for number in range(3):
            gate.release()
            if not number:
                assert b"chunked" in client.read_head()
            assert events(client.read_chunk())[0]["word"] == str(number)
        client.close()
        while not model.closed:
            gate.release()


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_client_that_does_not_read_is_cut_off_and_its_request_ended(loop: str) -> None:
    def talk(inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        while True:
            yield {"word": np.array([[b"x" * 10_000]], object)}

    model = FakeStreamingModel(WORDS, talk)
    with GatedServer(loop, {"speaker": model}, max_unsent_bytes=100_000) as server:
        client = server.connect()
        client.send(stream("a", 1))
        with server.ended(model):
            pass
        assert server.connect().ask(infer(1)).data == [2, 0]


def test_a_stream_behind_a_slow_answer_is_bounded_too() -> None:
    def talk(inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        while True:
            yield {"word": np.array([[b"x" * 10_000]], object)}

    model = FakeStreamingModel(WORDS, talk)
    with GatedServer(also={"speaker": model}, max_unsent_bytes=100_000) as server:
        server.gate.clear()
        client = server.connect()
        client.send(infer(1) + stream("a", 1))
        with server.ended(model):
            server.gate.set()


def test_a_stream_behind_a_slow_answer_grows_in_place() -> None:
    """The test would take minutes if each event copied all waiting data."""
    model = FakeStreamingModel(WORDS, speak)
    with GatedServer(also={"speaker": model}, max_unsent_bytes=1 << 30) as server:
        client = server.connect()
        assert client.ask(infer(1)).data == [2, 0]  # after the first response, several requests may be in flight
        server.entered.acquire()
        server.gate.clear()
        client.send(infer(1))
        assert server.entered.acquire(timeout=PATIENCE_S)
        with server.ended(model):
            client.send(stream("x" * 8000, 5000))
        server.gate.set()
        assert client.read().data == [2, 0]
        assert len(events(client.read().body)) == 5000


def test_a_model_with_several_outputs() -> None:
    signature = Signature(
        (TensorSpec("x", DataType.FP32, (-1,)),),
        (TensorSpec("y", DataType.FP32, (-1,)), TensorSpec("h", DataType.FP16, (-1,))),
    )
    model = FakeModel(signature, lambda inputs: {"y": inputs["x"], "h": inputs["x"].astype(np.float16)})
    with GatedServer(also={"both": model}) as server:
        refused = server.connect().ask(post(b'{"x":1}', path="/v2/models/both/generate"))
        assert (refused.status, "FP16 has no JSON form" in refused.error) == (400, True)
