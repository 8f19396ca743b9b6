import asyncio
from collections.abc import Mapping

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.online.scheduler.dynamic_batcher import BatchingConfig, DynamicBatcher, Outcome
from penstock.online.scheduler.instance import Instance
from penstock.request import InferRequest, InferResponse
from penstock.tensor import Array
from penstock.testing import FakeModel, double


def fails_on_negative(inputs: Mapping[str, Array]) -> dict[str, Array]:
    if (inputs["x"] < 0).any():
        raise ZeroDivisionError("engine bug")
    return double(inputs)


def run(values: list[float], max_batch: int) -> list[Outcome]:
    async def main() -> list[Outcome]:
        batcher = DynamicBatcher(BatchingConfig(batchable=True, max_batch=max_batch), asyncio.get_running_loop())
        instance = Instance("i", FakeModel(forward=fails_on_negative), batcher)
        outcomes: list[Outcome] = []
        for value in values:
            request = InferRequest("m", {"x": np.full((1, 2), value, np.float32)}, "1")
            batcher.submit(request, 1, None, outcomes.append)
        instance.start()
        await batcher.drain()
        batcher.stop()
        instance.join(10)
        return outcomes

    return asyncio.run(main())


def test_a_failing_batch_fails_alone_and_the_thread_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = run([1, -1, 3], max_batch=1)
    assert [isinstance(outcome, InferResponse) for outcome in outcomes] == [True, False, True]
    assert isinstance(outcomes[1], PenstockError)
    assert "engine bug" not in outcomes[1].message
    assert "engine bug" in caplog.text


def test_requests_of_one_batch_share_its_fate(caplog: pytest.LogCaptureFixture) -> None:
    assert all(isinstance(outcome, PenstockError) for outcome in run([1, -1, 3], max_batch=8))
