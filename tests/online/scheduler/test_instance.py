import asyncio
from collections.abc import Mapping

import numpy as np
import pytest

import models
from penstock.engines.base import LoadedModel
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import PenstockError
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.instance import Instance
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.tensor import Array, DataType
from penstock.testing import FakeModel, double


def fails_on_negative(inputs: Mapping[str, Array]) -> dict[str, Array]:
    if (inputs["x"] < 0).any():
        raise ZeroDivisionError("engine bug")
    return double(inputs)


def outcomes_of(model: LoadedModel, inputs: list[Array], max_batch: int) -> list[Outcome]:
    """What each request for one row gets, in the order of asking; all wait when the instance starts."""

    async def main() -> list[Outcome]:
        batcher = DynamicBatcher(BatchingConfig(batchable=True, max_batch=max_batch), asyncio.get_running_loop())
        instance = Instance("i", model, batcher)
        outcomes: list[Outcome] = []
        for array in inputs:
            batcher.submit(InferRequest("m", {"x": array}, "1"), 1, None, outcomes.append)
        # The thread starts when this turn of the loop has handed over all that was submitted.
        asyncio.get_running_loop().call_soon(instance.start)
        await batcher.drain()
        batcher.stop()
        instance.join(10)
        return outcomes

    return asyncio.run(main())


def run(values: list[float], max_batch: int) -> list[Outcome]:
    rows = [np.full((1, 2), value, np.float32) for value in values]
    return outcomes_of(FakeModel(forward=fails_on_negative), rows, max_batch)


def test_a_failing_batch_fails_alone_and_the_thread_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = run([1, -1, 3], max_batch=1)
    assert [isinstance(outcome, InferResponse) for outcome in outcomes] == [True, False, True]
    assert isinstance(outcomes[1], PenstockError)
    assert "engine bug" not in outcomes[1].message
    assert "engine bug" in caplog.text


def test_in_a_merged_batch_only_the_request_to_blame_fails(caplog: pytest.LogCaptureFixture) -> None:
    first, wrong, last = run([1, -1, 3], max_batch=8)
    assert isinstance(wrong, PenstockError)
    for outcome, value in ((first, 2), (last, 6)):
        assert isinstance(outcome, InferResponse)
        np.testing.assert_array_equal(outcome.outputs["y"], [[value, value]])


def test_a_model_that_fails_on_one_row_is_told_to_that_client_only() -> None:
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    lookup = models.artifact(
        [("Gather", ["table", "x"], ["y"])],
        [("x", DataType.INT64.onnx, ["N"])],
        [("y", DataType.FP32.onnx, ["N", 2])],
        {"table": table},
    )
    model = OnnxRuntimeEngine().load(lookup, {"threads": 1})
    good, wrong, also_good = outcomes_of(model, [np.array([index], np.int64) for index in (1, 99, 3)], max_batch=8)
    assert isinstance(wrong, PenstockError)
    for outcome, index in ((good, 1), (also_good, 3)):
        assert isinstance(outcome, InferResponse)
        np.testing.assert_array_equal(outcome.outputs["y"], table[[index]])
