"""Calls of Triton's Python models to other models, in real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from penstock.errors import Code, NotFound, PenstockError
from penstock.online.instances.model_calls import ModelCall
from penstock.online.instances.python.process import PythonProcess
from penstock.request import Done, InferRequest, InferResponse
from python_models import PATIENCE_S, Processes, ask, failure, request


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.end()


class Server:
    """Answers the calls of models on an event loop in another thread: ``double`` doubles, ``count`` counts, others are not found."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.asked: SimpleQueue[InferRequest] = SimpleQueue()
        self.cancelled = threading.Event()

    def connect(self, model: PythonProcess) -> PythonProcess:
        model.connect(lambda: ModelCall(self.loop, self.call))
        return model

    def call(self, request: InferRequest, done: Done, handle: object = None, decoupled: bool = False) -> Any:
        self.asked.put(request)
        if request.model_name == "double":
            self.loop.call_soon(done, InferResponse("double", "1", {"y": request.inputs["x"] * 2}))
        elif request.model_name == "count":
            for number in range(3):
                y = request.inputs["x"] + number
                self.loop.call_soon(done, InferResponse("count", "1", {"y": y}, final=False))
            self.loop.call_soon(done, InferResponse("count", "1", {}))
        elif request.model_name == "never":
            return self
        else:
            done(NotFound(f"no model '{request.model_name}'"))
        return None

    def cancel(self) -> None:
        self.cancelled.set()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def server(processes: Processes) -> Iterator[Server]:
    server = Server()
    yield server
    processes.end()
    server.end()


CALLER = """
def ask(self, x, name):
    return pb_utils.InferenceRequest(model_name=name, requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x)])

def answer(self, reply):
    if reply.has_error():
        return pb_utils.InferenceResponse(error=reply.error())
    return pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(reply, "y")])
"""

SYNC = """
def execute(self, requests):
    return [self.answer(self.ask(one.inputs()[0].as_numpy(), "{}").exec()) for one in requests]
"""

ASYNC = """
async def execute(self, requests):
    import asyncio
    asked = [self.ask(one.inputs()[0].as_numpy(), "double").async_exec() for one in requests]
    return [self.answer(reply) for reply in await asyncio.gather(*asked)]
"""

FROM_THREADS = """
def execute(self, requests):
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(8) as pool:
        replies = pool.map(lambda one: self.ask(one.inputs()[0].as_numpy(), "double").exec(), requests)
    return [self.answer(reply) for reply in replies]
"""

STREAMED = """
def execute(self, requests):
    x = requests[0].inputs()[0].as_numpy()
    total = sum(one.output_tensors()[0].as_numpy() for one in self.ask(x, "count").exec(decoupled=True))
    return [pb_utils.InferenceResponse([pb_utils.Tensor("y", total)])]
"""

STREAMED_ASYNC = """
async def execute(self, requests):
    x, total = requests[0].inputs()[0].as_numpy(), 0
    for one in await self.ask(x, "count").async_exec(decoupled=True):
        total = total + one.output_tensors()[0].as_numpy()
    return [pb_utils.InferenceResponse([pb_utils.Tensor("y", total)])]
"""


BYTES = SYNC.replace('"{}"', 'b"double"')


@pytest.mark.parametrize(
    "body", [SYNC.format("double"), BYTES, ASYNC, FROM_THREADS], ids=["sync", "bytes", "async", "threads"]
)
def test_a_model_asks_others(processes: Processes, server: Server, body: str) -> None:
    model = server.connect(processes.load(CALLER + body))
    outcomes = ask(model, [request(number) for number in range(8)])
    assert [outcome["y"][0, 0] for outcome in outcomes] == [2 * number for number in range(8)]
    assert server.asked.get().outputs == ("y",)


@pytest.mark.parametrize("body", [STREAMED, STREAMED_ASYNC], ids=["sync", "async"])
def test_a_model_asks_a_decoupled_one(processes: Processes, server: Server, body: str) -> None:
    model = server.connect(processes.load(CALLER + body))
    (outcome,) = ask(model, [request(1)])
    assert outcome["y"][0, 0] == 1 + 2 + 3


def test_large_tensors_pass_both_ways(processes: Processes, server: Server) -> None:
    model = server.connect(processes.load(CALLER + SYNC.format("double")))
    x = np.arange(2 << 20, dtype=np.float32).reshape(-1, 2)
    (outcome,) = ask(model, [InferRequest("m", {"x": x})])
    np.testing.assert_array_equal(outcome["y"], x * 2)


def test_an_error_of_another_model_is_told(processes: Processes, server: Server) -> None:
    model = server.connect(processes.load(CALLER + SYNC.format("absent")))
    (outcome,) = ask(model, [request(1)])
    assert isinstance(outcome, NotFound)
    assert outcome.message == "no model 'absent'"


def test_a_model_with_one_instance_does_not_wait_for_itself(processes: Processes, server: Server) -> None:
    model = server.connect(processes.load(CALLER + SYNC.format("m")))
    (outcome,) = ask(model, [request(1)])
    assert "has one instance, which would wait for itself" in outcome.message


def test_a_function_with_one_instance_does_not_wait_for_itself(processes: Processes, server: Server) -> None:
    source = """
    import penstock
    from penstock import Context, Tensor

    @penstock.model
    def f(x: Tensor["FP32", -1, 2], c: Context) -> Tensor["FP32", -1, 2]:
        return c.infer("m", {"x": x})["output"]
    """
    model = server.connect(processes.load(source, {}, head=""))
    assert "has one instance, which would wait for itself" in failure(model, [request(1)])


def test_a_model_that_is_not_served_yet_asks_nobody(processes: Processes) -> None:
    (outcome,) = ask(processes.load(CALLER + SYNC.format("double")), [request(1)])
    assert outcome.code is Code.UNAVAILABLE


def test_a_question_ends_with_the_model(processes: Processes, server: Server) -> None:
    model = server.connect(processes.load(CALLER + SYNC.format("never")))
    failures: SimpleQueue[Exception] = SimpleQueue()

    def execute() -> None:
        try:
            ask(model, [request(1)])
        except PenstockError as error:
            failures.put(error)

    thread = threading.Thread(target=execute)
    thread.start()
    server.asked.get(timeout=PATIENCE_S)
    model.unload()
    assert isinstance(failures.get(timeout=PATIENCE_S), PenstockError)
    assert server.cancelled.wait(PATIENCE_S)
    thread.join()


@pytest.mark.parametrize(
    "wrong", ["priority=np.int64(1)", "parameters={1: 2}", "request_id=3", "requested_output_names=[1]"]
)
def test_a_wrong_question_costs_no_process(processes: Processes, server: Server, wrong: str) -> None:
    body = SYNC.replace(
        'self.ask(one.inputs()[0].as_numpy(), "{}")', f"pb_utils.InferenceRequest(model_name='double', {wrong})"
    )
    model = server.connect(processes.load(CALLER + body))
    pid = model.pid
    assert "the request to model 'double' is invalid" in failure(model, [request(1)])
    assert model.pid == pid


def test_nobody_is_asked_while_the_model_is_loaded(processes: Processes) -> None:
    body = """
    def initialize(self, args):
        x = np.zeros((1, 2), np.float32)
        reply = self.ask(x, "double").exec()
        assert "while it is loaded" in reply.error().message()
        raise ValueError("known")
    """
    with pytest.raises(PenstockError, match="ValueError: known"):
        processes.load(CALLER + dedent(body) + SYNC.format("double"))


def test_who_drops_the_responses_gives_the_request_up(processes: Processes, server: Server) -> None:
    body = """
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        self.ask(x, "never").exec(decoupled=True)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
    """
    model = server.connect(processes.load(CALLER + dedent(body)))
    assert ask(model, [request(1)])[0]["y"][0, 0] == 1
    assert server.cancelled.wait(PATIENCE_S)


def test_a_death_gives_up_what_was_asked(processes: Processes, server: Server) -> None:
    model = server.connect(processes.load(CALLER + SYNC.format("never")))
    failures: SimpleQueue[str] = SimpleQueue()
    thread = threading.Thread(target=lambda: failures.put(failure(model, [request(1)])))
    thread.start()
    server.asked.get(timeout=PATIENCE_S)
    assert model.pid is not None
    os.kill(model.pid, signal.SIGKILL)
    assert "died in the middle" in failures.get(timeout=PATIENCE_S)
    assert server.cancelled.wait(PATIENCE_S)
    thread.join()
