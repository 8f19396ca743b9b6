import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import FakeCall
from gated_grpc import request
from penstock.errors import Cancelled, Code, NotFound, PenstockError, ResourceExhausted, Unavailable
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.grpc.inference import Inference
from penstock.online.server.grpc.stream import InferStream
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.protocol import messages
from penstock.request import Deadline, Done, InferRequest, InferResponse


class Asked:
    """A request that the data plane has received; the test answers it."""

    def __init__(self, request: InferRequest, done: Done) -> None:
        self.request, self.done = request, done
        self.is_over = False

    def answer(self, *values: float, final: bool = True) -> None:
        self.is_over = final
        outputs = {"y": np.array(values, np.float32)} if values else {}
        self.done(InferResponse(self.request.model_name, "1", outputs, self.request.id, final=final))

    def fail(self, error: PenstockError) -> None:
        self.is_over = True
        self.done(error)

    def cancel(self) -> None:
        if not self.is_over:
            self.fail(Cancelled("cancelled"))


class Plane:
    """A data plane whose responses the test triggers. Models whose names start with ``d`` are decoupled."""

    class tracer:  # noqa: N801 - stands for an attribute
        enabled = False

    def __init__(self) -> None:
        self.shared_memory = SharedMemory(enabled=False)
        self.response_limit = ResponseLimit()
        self.asked: list[Asked] = []

    def enter(self, client: str) -> None:
        assert client == "alice"

    def acquire(self, name: str, version: str, client: str) -> Any:
        if name == "absent":
            raise NotFound(f"'{name}' is not found")
        return SimpleNamespace(name=name, decoupled=name.startswith("d"))

    def check(self, request: InferRequest, client: str) -> None:
        assert (request.inputs["x"].shape, client) == ((10_000,), "alice")

    def infer(self, handle: Any, request: InferRequest, done: Done, decoupled: bool = False) -> Asked | None:
        assert decoupled
        assert handle.name == request.model_name
        self.asked.append(Asked(request, done))
        return self.asked[-1]


class Stream:
    def __init__(self, limit: int = 8, max_bytes: int = 0, **metadata: str) -> None:
        self.plane = Plane()
        self.call = FakeCall(dict(metadata), Deadline(5.0))
        self.ended = 0
        self.budget = ByteBudget(max_bytes)
        inference = Inference(self.plane, self.budget)  # type: ignore[arg-type]
        self.call.client = "alice"
        self.receiver = InferStream(self.call, inference, limit, self._end)

    def ask(self, model: str, identity: str, **parameters: bool) -> None:
        message = request(model, 1, id=identity)
        for name, value in parameters.items():
            message.parameters[name].bool_param = value
        self.send(message.SerializeToString())

    def send(self, data: bytes) -> None:
        """Deliver a message as the transport does."""
        if self.receiver.admit(data):
            self.receiver.message(data)

    def _end(self, stream: InferStream) -> None:
        assert stream is self.receiver
        self.ended += 1

    @property
    def ids(self) -> list[str]:
        return [answer.infer_response.id for answer in self.call.answers()]


def test_requests_carry_client_and_deadline() -> None:
    stream = Stream()
    stream.ask("m", "7")
    (asked,) = stream.plane.asked
    assert (asked.request.client, asked.request.deadline, asked.request.id) == ("alice", Deadline(5.0), "7")


def test_answers_of_one_model_keep_their_order_and_others_do_not_wait() -> None:
    stream = Stream()
    for model, identity in (("m", "a"), ("m", "b"), ("n", "c"), ("m", "d")):
        stream.ask(model, identity)
    a, b, c, d = stream.plane.asked
    b.fail(Unavailable("full"))
    assert stream.ids == []
    c.answer(1)
    assert stream.ids == ["c"]
    a.answer(1)
    assert stream.ids == ["c", "a", "b"]
    d.answer(1)
    assert stream.ids == ["c", "a", "b", "d"]
    assert [answer.error_message for answer in stream.call.answers()] == ["", "", "full", ""]


def test_requests_count_until_their_last_answer() -> None:
    size = len(request("m", 1, id="a").SerializeToString())
    stream = Stream(max_bytes=2 * size + 1)
    for model, identity in (("d", "a"), ("m", "b"), ("m", "c")):
        stream.ask(model, identity)
    (refused,) = stream.call.answers()
    assert (refused.infer_response.id, refused.error_message) == ("c", str(stream.budget.refusal()))
    a, b = stream.plane.asked
    a.answer(1, final=False)
    assert stream.budget.used == 2 * size
    a.answer(final=True)
    assert stream.budget.used == size
    stream.ask("m", "e")
    stream.send(b"nonsense")
    b.fail(Unavailable("full"))
    stream.ask("absent", "f")
    assert stream.budget.used == size
    stream.call.on_cancel()
    assert stream.budget.used == 0


def test_a_stream_that_ends_on_error_holds_nothing() -> None:
    stream = Stream(max_bytes=1000, triton_grpc_error="true")
    for identity in "ab":
        stream.ask("m", identity)
    stream.plane.asked[0].fail(Unavailable("full"))
    assert stream.budget.used == 0


def test_decoupled_answers_go_out_as_they_come() -> None:
    stream = Stream()
    stream.ask("d", "a", triton_enable_empty_final_response=True)
    stream.ask("d", "b")
    a, b = stream.plane.asked
    b.answer(1, final=False)
    a.answer(1, final=False)
    b.answer()
    a.answer()
    assert stream.ids == ["b", "a", "a"]
    finals = [answer.infer_response.parameters["triton_final_response"].bool_param for answer in stream.call.answers()]
    assert finals == [False, False, True]


def test_work_of_one_stream_is_bounded_and_held_answers_count() -> None:
    stream = Stream(limit=2)
    stream.ask("m", "a")
    assert not stream.call.is_paused
    stream.ask("m", "b")
    assert stream.call.is_paused
    a, b = stream.plane.asked
    b.answer(1)
    assert stream.call.is_paused
    a.answer(1)
    assert not stream.call.is_paused


def test_what_was_held_back_may_come_within_resume() -> None:
    stream = Stream(limit=1)
    waiting = [("absent", str(n)) for n in range(5000)] + [("m", "last")]

    def deliver() -> None:
        while waiting and not stream.call.is_paused:
            stream.ask(*waiting.pop(0))

    stream.call.resumed = deliver
    stream.ask("m", "first")
    stream.plane.asked[0].answer(1)
    stream.plane.asked[1].answer(1)
    assert not waiting
    assert len(stream.ids) == 5002


def test_half_close_waits_for_all_answers() -> None:
    stream = Stream()
    stream.ask("m", "a")
    stream.ask("d", "b")
    stream.receiver.half_close()
    stream.plane.asked[0].answer(1)
    stream.plane.asked[1].answer(1, final=False)
    assert not stream.call.ended
    stream.plane.asked[1].answer()
    assert (stream.call.ended, stream.call.error, stream.ended) == (True, None, 1)


def test_half_close_of_an_idle_stream_ends_it() -> None:
    stream = Stream()
    stream.receiver.half_close()
    assert (stream.call.ended, stream.call.error, stream.ended) == (True, None, 1)


def test_going_away_cancels_all_work() -> None:
    stream = Stream()
    for identity in "abc":
        stream.ask("m", identity)
    stream.plane.asked[0].answer(1)
    stream.call.cancel()
    assert all(asked.is_over for asked in stream.plane.asked)
    assert (stream.ids, stream.ended) == (["a"], 1)
    stream.ask("m", "late")
    assert len(stream.plane.asked) == 3


def test_errors_may_end_the_stream() -> None:
    for cause in ("answer", "message"):
        stream = Stream(triton_grpc_error="true")
        stream.ask("m", "a")
        stream.ask("m", "b")
        if cause == "answer":
            stream.plane.asked[1].fail(Unavailable("full"))
        else:
            stream.send(b"\xff")
        assert stream.call.error is not None
        assert all(asked.is_over for asked in stream.plane.asked)
        assert (stream.call.sent, stream.ended) == ([], 1)


def test_draining_answers_what_was_asked() -> None:
    stream, idle = Stream(), Stream()
    stream.ask("m", "a")
    for each in (stream, idle):
        each.receiver.drain(Unavailable("stopping"))
    assert str(idle.call.error) == "stopping"
    stream.ask("m", "b")
    assert [answer.error_message for answer in stream.call.answers()] == ["stopping"]
    stream.plane.asked[0].answer(1)
    assert stream.ids == ["b", "a"]
    assert str(stream.call.error) == "stopping"


def test_an_answer_that_cannot_be_written_is_an_error() -> None:
    stream = Stream()
    stream.ask("m", "a")
    stream.plane.asked[0].done(InferResponse("m", "1", {"y": np.array([object()])}))
    (answer,) = stream.call.answers()
    assert "must be bytes or text" in answer.error_message
    stream.receiver.half_close()
    assert stream.call.ended


@given(st.lists(st.sampled_from(["m", "n", "d"]), max_size=20), st.data())
def test_every_request_is_answered_once_and_in_its_models_order(asked: list[str], draw: st.DataObject) -> None:
    stream = Stream(limit=100)
    for number, model in enumerate(asked):
        stream.ask(model, f"{model}{number}")
    waiting = list(stream.plane.asked)
    while waiting:
        one = waiting.pop(draw.draw(st.integers(0, len(waiting) - 1)))
        if draw.draw(st.booleans()):
            one.fail(Unavailable("no"))
        else:
            one.answer(1)
    for model in "mn":
        wanted = [f"{model}{number}" for number, name in enumerate(asked) if name == model]
        assert [identity for identity in stream.ids if identity.startswith(model)] == wanted
    assert len(stream.ids) == len(asked)
    stream.receiver.half_close()
    assert stream.call.ended


def large(model: str, identity: str) -> bytes:
    """A request that is decoded on another thread."""
    message = messages.ModelInferRequest(model_name=model, id=identity)
    tensor = message.inputs.add(name="x", datatype="INT64", shape=[10_000])
    tensor.contents.int64_contents.extend([5] * 10_000)
    return bytes(message.SerializeToString())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


def test_what_follows_a_large_request_waits_for_it() -> None:
    async def run() -> None:
        stream = Stream(max_bytes=200_000)
        stream.send(large("m", "a"))
        assert stream.call.is_paused, "the transport delivers nothing before it is decoded"
        stream.receiver.drain(Unavailable("stopping"))
        assert not stream.call.ended
        await until(lambda: not stream.call.is_paused)
        (asked,) = stream.plane.asked
        assert asked.request.id == "a"
        assert stream.budget.used >= len(large("m", "a")) + 80_000
        asked.answer(1)
        assert (stream.call.ended, stream.budget.used) == (True, 0)

    asyncio.run(run())


def test_a_large_request_that_is_refused_or_left_gives_everything_back() -> None:
    async def run() -> None:
        for max_bytes, data, error in ((50_000, large("m", "a"), "memory"), (0, large("m", "a")[:-9], "")):
            stream = Stream(max_bytes=max_bytes)
            stream.send(data)
            await until(partial(getattr, stream.call, "sent"))
            (refused,) = stream.call.answers()
            assert error in refused.error_message
            assert (stream.budget.used, stream.call.is_paused) == (0, False)
        stream = Stream(max_bytes=200_000)
        stream.send(large("m", "a"))
        stream.call.cancel()
        await until(lambda: not stream.budget.used)
        assert (stream.plane.asked, stream.ended) == ([], 1)

    asyncio.run(run())


@pytest.mark.parametrize("model", ["m", "d"])
def test_answers_keep_their_order_when_one_takes_long_to_encode(model: str) -> None:
    async def run() -> None:
        stream = Stream()
        for identity in ("a", "b"):
            stream.ask(model, identity)
        a, b = stream.plane.asked
        a.done(InferResponse("m", "1", {"y": np.full(1000, b"abc", object)}, "a"))
        b.answer(1)
        assert stream.ids == [], "encoded on the event loop"
        stream.receiver.half_close()
        await until(lambda: stream.call.ended)
        assert (stream.ids, stream.call.error) == (["a", "b"], None)

    asyncio.run(run())


def test_a_model_that_answers_faster_than_it_can_be_told_ends_the_stream() -> None:
    async def run() -> None:
        stream = Stream(max_bytes=1000)
        stream.ask("d", "a")
        (asked,) = stream.plane.asked
        for _ in range(3000):
            asked.done(InferResponse("d", "1", {"y": np.full(300, b"abc", object)}, "a", final=False))
        assert stream.call.ended
        assert stream.call.error is not None
        assert stream.call.error.code is Code.RESOURCE_EXHAUSTED
        asked.answer(final=True)
        await until(lambda: not stream.budget.used)

    asyncio.run(run())


def test_a_client_over_its_rate_is_told_so_before_its_message_is_decoded() -> None:
    stream = Stream()

    def enter(client: str) -> None:
        raise ResourceExhausted("slow down")

    stream.plane.enter = enter  # type: ignore[method-assign]
    stream.ask("m", "a")
    assert not stream.receiver.admit(None)
    assert [(each.error_message, each.infer_response.id) for each in stream.call.answers()] == [
        ("slow down", "a"),
        ("slow down", ""),
    ]
