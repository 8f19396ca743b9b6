from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from penstock.engines.base import Answer, RequestModel
from penstock.errors import Cancelled, InvalidArgument, PenstockError
from penstock.online.instances.instance import Instance
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.queue import Pending
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import ModelStatistics
from penstock.testing import DOUBLER

PATIENCE_S = 30
Execute = Callable[[Sequence[InferRequest], Answer], None]


class FakeRequestModel:
    """Runs ``execute``."""

    signature = DOUBLER
    reentrant = False
    max_batch = 8

    def __init__(self, execute: Execute, decoupled: bool = False) -> None:
        self.execute = execute
        self.decoupled = decoupled

    def unload(self) -> None:
        """Nothing to release."""


def outcomes_of(
    execute: Execute,
    values: list[float],
    decoupled: bool = False,
    on_answer: Callable[[Pending], None] = lambda _: None,
) -> tuple[list[list[Outcome]], ModelStatistics]:
    """All answers to a request for each of ``values``; all requests wait when the instance starts."""
    model = FakeRequestModel(execute, decoupled)
    assert isinstance(model, RequestModel)

    async def main() -> tuple[list[list[Outcome]], ModelStatistics]:
        config = BatchingConfig(batchable=True, max_batch=8, decoupled=decoupled)
        batcher = DynamicBatcher(config, asyncio.get_running_loop())
        instance = Instance("i", model, batcher)
        told: list[list[Outcome]] = [[] for _ in values]
        pending: list[Pending] = []

        def receiver(number: int) -> Callable[[Outcome], None]:
            def done(outcome: Outcome) -> None:
                told[number].append(outcome)
                on_answer(pending[number])

            return done

        for number, value in enumerate(values):
            request = InferRequest("m", {"x": np.full((1, 2), value, np.float32)}, "1")
            pending.append(batcher.submit(request, 1, None, receiver(number)))
        asyncio.get_running_loop().call_soon(instance.start)
        await batcher.drain()
        batcher.stop()
        instance.join(PATIENCE_S)
        await asyncio.sleep(0)
        return told, batcher.statistics

    return asyncio.run(main())


def value_of(outcome: Outcome) -> float:
    assert isinstance(outcome, InferResponse)
    return float(outcome.outputs["y"][0, 0])


def test_a_batch_is_executed_at_once_and_answered_request_by_request() -> None:
    def execute(requests: Sequence[InferRequest], answer: Answer) -> None:
        assert len(requests) == 3
        for number, request in enumerate(requests):
            x = request.inputs["x"]
            answer(number, InvalidArgument("no") if x[0, 0] == 2 else {"y": x * 2}, True)

    told, statistics = outcomes_of(execute, [1, 2, 3])
    assert [value_of(told[number][0]) for number in (0, 2)] == [2, 6]
    assert isinstance(told[1][0], InvalidArgument)
    assert (statistics.execution_count, statistics.inference_count, statistics.fail.count) == (1, 2, 1)


def test_who_is_not_answered_is_told() -> None:
    def execute(_: Sequence[InferRequest], answer: Answer) -> None:
        answer(0, {"y": np.zeros((1, 2))}, True)

    told, _ = outcomes_of(execute, [1, 2])
    assert value_of(told[0][0]) == 0
    assert str(told[1][0]) == "the model did not answer this request"


def test_what_is_raised_befalls_those_without_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    def execute(_: Sequence[InferRequest], answer: Answer) -> None:
        answer(0, {"y": np.ones((1, 2))}, True)
        raise ZeroDivisionError("a secret")

    told, _ = outcomes_of(execute, [1, 2])
    assert value_of(told[0][0]) == 1
    assert str(told[1][0]) == "the model failed: ZeroDivisionError"
    assert "a secret" in caplog.text


def test_a_decoupled_model_answers_after_it_has_executed() -> None:
    def execute(requests: Sequence[InferRequest], answer: Answer) -> None:
        def work() -> None:
            for number in range(int(requests[0].inputs["x"][0, 0])):
                assert answer(0, {"y": np.full((1, 2), number)}, False)
            answer(0, None, True)

        threading.Thread(target=work).start()

    told, statistics = outcomes_of(execute, [2, 40], decoupled=True)
    for outcomes, count in zip(told, (2, 40), strict=True):
        assert [value_of(outcome) for outcome in outcomes[:-1]] == list(range(count))
        assert isinstance(outcomes[-1], InferResponse)
        assert outcomes[-1].final
    assert statistics.responses[0].answers["success"].count == 2


def test_an_error_ends_a_stream_and_no_more_is_wanted() -> None:
    wanted: list[bool] = []

    def execute(_: Sequence[InferRequest], answer: Answer) -> None:
        answer(0, {"y": np.zeros((1, 2))}, False)
        answer(0, PenstockError("broken"), False)
        wanted.append(answer(0, {"y": np.zeros((1, 2))}, False))

    ((first, last),), _ = outcomes_of(execute, [1], decoupled=True)
    assert value_of(first) == 0
    assert str(last) == "broken"
    assert wanted == [False]


def test_a_cancelled_stream_is_not_wanted() -> None:
    ended = threading.Event()

    def execute(_: Sequence[InferRequest], answer: Answer) -> None:
        while answer(0, {"y": np.zeros((1, 2))}, False):
            pass
        assert not answer(0, None, False)
        answer(0, None, True)
        ended.set()

    told, _ = outcomes_of(execute, [1], decoupled=True, on_answer=Pending.cancel)
    assert isinstance(told[0][-1], Cancelled)
    assert ended.is_set()
