import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calls import FakeCall
from gated_grpc import request, result
from penstock.errors import Code, InvalidArgument, NotFound, Unavailable
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.answer_form import AnswerForm
from penstock.online.server.grpc.inference import Inference
from penstock.protocol import messages
from penstock.request import Deadline, Done, InferRequest, InferResponse
from penstock.testing import DOUBLER


class Lease:
    placements: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.releases = 0

    def lease(self) -> Any:
        return self

    def array(self, *asked: Any) -> np.ndarray:
        return np.ones((1, 2), np.float32)

    def release(self) -> None:
        self.releases += 1


class Plane:
    """Holds one request until the test answers it."""

    class tracer:  # noqa: N801 - stands for an attribute
        enabled = True

    def __init__(self) -> None:
        self.shared_memory = Lease()
        self.response_limit = ResponseLimit()
        self.cancelled = 0

    def acquire(self, name: str, version: str, client: str) -> Any:
        if name == "gone":
            raise NotFound("gone")
        return SimpleNamespace(
            signature=DOUBLER, labels={"y": ["cat", "dog"]}, decoupled=False, row_bytes=0, function=None
        )

    def check(self, request: InferRequest, client: str) -> None:
        if request.inputs["x"].shape[0] > 20_000:
            raise InvalidArgument("too many rows")
        assert not request.inputs["x"].strides[0], "takes no memory"

    def infer(self, handle: Any, request: InferRequest, done: Done, decoupled: bool = False) -> Any:
        self.request, self.done = request, done
        return self

    def cancel(self) -> None:
        self.cancelled += 1


def ask(message: Any, **metadata: str) -> tuple[Plane, FakeCall]:
    plane, call = Plane(), FakeCall(dict(metadata), Deadline(5.0))
    Inference(plane).infer(call, message.SerializeToString())  # type: ignore[arg-type]
    return plane, call


def answer(name: str = "m") -> InferResponse:
    return InferResponse(name, "1", {"y": np.array([[1, 2]], np.float32)})


def test_deadline_and_trace_go_with_the_request() -> None:
    plane, call = ask(request("m", 1, id="7"), traceparent="00-a-b-01", tracestate="x=1")
    assert (plane.request.deadline, plane.request.id) == (Deadline(5.0), "7")
    assert (plane.request.traceparent, plane.request.tracestate) == ("00-a-b-01", "x=1")
    plane.done(answer())
    assert result(call.sent[0]) == [1, 2]
    assert (call.ended, call.error) == (True, None)


def test_errors_end_the_call() -> None:
    plane, call = ask(request("m", 1))
    plane.done(NotFound("no"))
    assert (call.sent, str(call.error)) == ([], "no")


def test_going_away_cancels() -> None:
    plane, call = ask(request("m", 1))
    call.cancel()
    assert plane.cancelled == 1


class Wide:
    """A handle whose answers are large for their requests."""

    row_bytes, decoupled = 1, False

    def __init__(self) -> None:
        self.holders = 0

    def amplified_bytes(self, request: InferRequest) -> int:
        return 8 << 20

    def hold(self) -> None:
        self.holders += 1

    def release(self) -> None:
        self.holders -= 1


class WidePlane(Plane):
    def __init__(self) -> None:
        super().__init__()
        self.wide = Wide()

    def acquire(self, name: str, version: str, client: str) -> Any:
        return self.wide


class HeldCall(FakeCall):
    """Its client leaves large answers unread until ``room`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.room = asyncio.Event()
        self.error_then: Unavailable | None = None

    async def hold(self, size: int) -> None:
        await self.room.wait()
        if self.error_then is not None:
            raise self.error_then
        await super().hold(size)


def test_a_request_with_a_large_answer_waits_for_room() -> None:
    async def run() -> None:
        plane, call = WidePlane(), HeldCall()
        inference = Inference(plane)  # type: ignore[arg-type]
        inference.infer(call, in_shared_memory().SerializeToString())
        for _ in range(5):
            await asyncio.sleep(0)
        assert (hasattr(plane, "request"), plane.wide.holders, call.occupied) == (False, 1, 8 << 20)
        call.room.set()
        await until(lambda: not inference._tasks)
        assert (plane.wide.holders, call.reserved, call.is_parked, call.occupied) == (0, 8 << 20, True, 0)
        call.cancel()
        assert plane.cancelled == 1
        plane.done(NotFound("cancelled"))
        assert plane.shared_memory.releases == 1

    asyncio.run(run())


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_request_that_ends_before_there_is_room_leaves_nothing(has_begun: bool) -> None:
    async def run() -> None:
        for cancels in (True, False):
            plane, call = WidePlane(), HeldCall()
            inference = Inference(plane)  # type: ignore[arg-type]
            inference.infer(call, in_shared_memory().SerializeToString())
            if has_begun:
                await asyncio.sleep(0)
            if cancels:
                call.cancel()
            else:
                call.error_then = Unavailable("full")
                call.room.set()
            await until(lambda inference=inference: not inference._tasks)
            await asyncio.sleep(0)
            assert (hasattr(plane, "request"), plane.wide.holders, plane.shared_memory.releases) == (False, 0, 1)
            assert cancels or str(call.error) == "full"

    asyncio.run(run())


def in_shared_memory() -> Any:
    message = request("m", 1, 2)
    del message.raw_input_contents[:]
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 8
    return message


def test_shared_memory_is_let_go_of_with_the_answer_of_either_kind() -> None:
    for outcome in (answer(), NotFound("no")):
        plane, call = ask(in_shared_memory())
        assert plane.shared_memory.releases == 0
        plane.done(outcome)
        assert plane.shared_memory.releases == 1
        assert call.ended


def test_classes_carry_their_labels() -> None:
    message = request("m", 1)
    message.outputs.add(name="y").parameters["classification"].int64_param = 2
    plane, call = ask(message)
    plane.done(answer())
    read = messages.ModelInferResponse.FromString(call.sent[0])
    assert (read.outputs[0].datatype, list(read.outputs[0].shape)) == ("BYTES", [1, 2])
    assert b"2.000000:1:dog" in read.raw_output_contents[0]


def test_an_unknown_model_ends_the_call_and_gives_the_shared_memory_back() -> None:
    message = in_shared_memory()
    message.model_name = "gone"
    plane, call = ask(message)
    assert (call.sent, str(call.error)) == ([], "gone")
    assert plane.shared_memory.releases == 1


def test_an_answer_that_cannot_be_encoded_is_an_error() -> None:
    plane = Plane()
    inference = Inference(plane)  # type: ignore[arg-type]
    for output, code in (
        (np.zeros((1, 2), np.float16), Code.INVALID_ARGUMENT),
        (np.zeros((1, 2), np.complex64), Code.UNIMPLEMENTED),
    ):
        form = AnswerForm(classification={"y": 1})
        error = inference.encode(plane.acquire("m", "1", ""), InferResponse("m", "1", {"y": output}), form)
        assert getattr(error, "code", None) is code


def heavy(kind: str) -> Any:
    """Requests that take long to decode: typed contents, BYTES, BOOL, many fields, an unusual form."""
    message = messages.ModelInferRequest(model_name="m", id="7")
    tensor = message.inputs.add(name="x", shape=[10_000])
    if kind == "typed":
        tensor.datatype = "INT64"
        tensor.contents.int64_contents.extend([5] * 10_000)
    elif kind == "fields":
        tensor.datatype, tensor.shape[0] = "FP32", 1
        message.raw_input_contents.append(bytes(4))
        for number in range(1000):
            message.parameters[str(number)].int64_param = number
    else:
        tensor.datatype = kind
        message.raw_input_contents.append(bytes(10_000) if kind == "BOOL" else b"\x01\0\0\0a" * 10_000)
    return message


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["typed", "fields", "BOOL", "BYTES"])
def test_requests_that_take_long_to_decode_leave_the_event_loop(kind: str) -> None:
    async def run() -> None:
        data = heavy(kind).SerializeToString()
        for _ in range(2):  # once as new, once as known
            plane, call = Plane(), FakeCall()
            inference = Inference(plane)  # type: ignore[arg-type]
            inference.infer(call, data)
            assert not hasattr(plane, "request"), "decoded on the event loop"
            await until(partial(hasattr, plane, "request"))
            assert plane.request.id == "7"
            assert call.reserved >= (0 if kind in ("BOOL", "fields") else plane.request.inputs["x"].nbytes)
            plane.done(answer())
            assert call.ended
            call = FakeCall()
            inference.infer(call, data[:-9])
            await until(partial(getattr, call, "ended"))
            assert call.error is not None
            assert call.error.code is Code.INVALID_ARGUMENT

    asyncio.run(run())


def test_raw_tensors_of_numbers_do_not_wait_for_a_thread() -> None:
    message = request("m", *[1.5] * 100_000)
    plane, call = ask(message)
    assert plane.request.inputs["x"].shape == (1, 100_000)
    assert call.reserved == 0


def test_memory_that_is_refused_is_not_taken() -> None:
    class Poor(FakeCall):
        def reserve(self, size: int) -> None:
            raise Unavailable("full")

    async def run() -> None:
        call = Poor()
        Inference(Plane()).infer(call, heavy("typed").SerializeToString())  # type: ignore[arg-type]
        await until(lambda: call.ended)
        assert str(call.error) == "full"

    asyncio.run(run())


def test_a_request_that_its_model_refuses_is_not_decoded() -> None:
    async def run() -> None:
        call = FakeCall()
        message = heavy("typed")
        message.inputs[0].shape[0] = 20_001
        Inference(Plane()).infer(call, message.SerializeToString())  # type: ignore[arg-type]
        await until(lambda: call.ended)
        assert (str(call.error), call.reserved) == ("too many rows", 0)

    asyncio.run(run())


def test_going_away_ends_the_decoding() -> None:
    async def run() -> None:
        plane, call = Plane(), FakeCall()
        inference = Inference(plane)  # type: ignore[arg-type]
        inference.infer(call, heavy("typed").SerializeToString())
        call.cancel()
        await until(lambda: not inference._tasks)
        assert not hasattr(plane, "request")

    asyncio.run(run())


@pytest.mark.parametrize(
    "output", [np.full(1000, b"abc", object), np.zeros((300, 300), np.float32).T, np.zeros((2, 5000), np.float32)]
)
def test_answers_that_take_long_to_encode_leave_the_event_loop(output: np.ndarray) -> None:
    async def run() -> None:
        plane, call = Plane(), FakeCall()
        message = request("m", 1)
        if output.flags.c_contiguous and output.dtype != object:
            message.outputs.add(name="y").parameters["classification"].int64_param = 2
        Inference(plane).infer(call, message.SerializeToString())  # type: ignore[arg-type]
        plane.done(InferResponse("m", "1", {"y": output}))
        assert not call.ended, "encoded on the event loop"
        await until(lambda: call.ended)
        assert call.error is None
        read = messages.ModelInferResponse.FromString(call.sent[0])
        assert len(read.raw_output_contents) == 1

    asyncio.run(run())
