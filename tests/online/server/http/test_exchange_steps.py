"""Decoding, encoding and compression on the other thread: the requests of one connection take turns."""

import asyncio
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from http_servers import LOOPS, PATIENCE_S, GatedServer, get, post
from penstock.online.server.http.exchange import AnswerSink, Exchange
from penstock.online.server.http.head import RequestHead
from penstock.online.server.network.connections import Connections
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel

SIGNATURE = Signature((TensorSpec("x", DataType.FP32, (-1, -1)),), (TensorSpec("y", DataType.FP32, (-1, -1)),))
VALUES = [1.5] * 3000
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, len(VALUES)], "data": VALUES}]}).encode()
LARGE = post(BODY, "Accept-Encoding: gzip\r\n", "/v2/models/same/infer")


class Thread(ThreadPoolExecutor):
    """One thread, which runs steps while ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__(1)
        self.gate = threading.Event()
        self.gate.set()
        self.submitted = self.left = self.most = 0

    def submit(self, work: Any, /, *args: Any, **named: Any) -> Future[Any]:
        self.submitted += 1
        self.left += 1
        self.most = max(self.most, self.left)
        return super().submit(self._run, partial(work, *args, **named))

    def _run(self, work: Callable[[], Any]) -> Any:
        assert self.gate.wait(PATIENCE_S)
        self.left -= 1
        return work()


@pytest.fixture(params=sorted(LOOPS))
def stepped(request: pytest.FixtureRequest) -> Iterator[tuple[GatedServer, Thread]]:
    with (
        GatedServer(request.param, {"same": FakeModel(SIGNATURE, lambda inputs: {"y": inputs["x"]})}) as server,
        Thread() as thread,
    ):
        server.call(lambda: server.loop.set_default_executor(thread))
        yield server, thread


def test_pipelined_requests_are_decoded_and_encoded_one_at_a_time(stepped: tuple[GatedServer, Thread]) -> None:
    server, thread = stepped
    client = server.connect()
    client.ask(LARGE)
    client.send(LARGE * 20)
    for _ in range(20):
        assert json.loads(gzip.decompress(client.read().body))["outputs"][0]["data"] == VALUES
    assert (thread.submitted, thread.most) == (3 * 21, 1)


def test_requests_of_a_client_that_has_disconnected_take_no_step(stepped: tuple[GatedServer, Thread]) -> None:
    server, thread = stepped
    client = server.connect()
    client.ask(LARGE)
    thread.gate.clear()
    before = thread.submitted
    client.send(LARGE * 10)
    server.until(lambda: thread.left == 1)
    client.close()
    server.until(lambda: len(server.connections) == 0)
    thread.gate.set()
    server.until(lambda: len(asyncio.all_tasks()) == 2)
    assert thread.submitted == before + 1


def test_the_api_description_is_compressed_once(stepped: tuple[GatedServer, Thread]) -> None:
    server, thread = stepped
    plain = server.connect().ask(get("/openapi.json"))
    packed = [server.connect().ask(get("/openapi.json", "Accept-Encoding: gzip\r\n")) for _ in range(3)]
    assert {gzip.decompress(answer.body) for answer in packed} == {plain.body}
    assert [answer.headers.get("content-encoding") for answer in (plain, *packed)] == [None] + 3 * ["gzip"]
    assert thread.submitted == 0


def test_one_connection_with_many_control_requests_does_not_hold_up_another() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        context = SimpleNamespace(connections=Connections(9))
        many, one = (cast(AnswerSink, SimpleNamespace(context=context, lane=asyncio.Lock())) for _ in range(2))

        async def ask(sink: AnswerSink, name: str) -> None:
            await Exchange(sink, RequestHead()).begin_control()
            order.append(name)

        await asyncio.gather(*(ask(many, "many") for _ in range(100)), ask(one, "one"))
        return order

    assert asyncio.run(main()).index("one") < 4
