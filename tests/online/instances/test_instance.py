import asyncio
import threading
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

import models
from penstock.engines.base import LoadedModel
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import Cancelled, PenstockError
from penstock.online.instances.instance import Instance, InstanceDied
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.queue import Pending
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import Failure, ModelStatistics, Reason
from penstock.tensor import Array, DataType, Signature, TensorSpec
from penstock.testing import FakeModel, FakeStreamingModel, double


def fails_on_negative(inputs: Mapping[str, Array]) -> dict[str, Array]:
    if (inputs["x"] < 0).any():
        raise ZeroDivisionError("engine bug")
    return double(inputs)


def outcomes_of(model: LoadedModel, inputs: list[Array], max_batch: int) -> list[Outcome]:
    """The outcome of each request for one row, in order; all requests wait when the instance starts."""

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


def test_a_batch_in_which_the_instance_died_is_not_tried_again() -> None:
    def dies(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise InstanceDied("the process of the model ended")

    model = FakeModel(forward=dies)
    outcomes = outcomes_of(model, [np.ones((1, 2), np.float32)] * 3, max_batch=8)
    assert [type(outcome) for outcome in outcomes] == [InstanceDied] * 3
    assert len(model.calls) == 1


class Streams:
    """Requests to a decoupled model, and their answers; a request is cancelled after ``cancel_at`` answers."""

    def __init__(self, model: FakeStreamingModel, rows: list[int], cancel_at: int = 0) -> None:
        self.outcomes: list[list[Outcome]] = [[] for _ in rows]
        self._cancel_at = cancel_at
        self._held: list[Pending] = []
        asyncio.run(self._main(model, rows))

    async def _main(self, model: FakeStreamingModel, rows: list[int]) -> None:
        config = BatchingConfig(batchable=True, max_batch=8, decoupled=True)
        batcher = DynamicBatcher(config, asyncio.get_running_loop())
        instance = Instance("i", model, batcher)
        for number, count in enumerate(rows):
            request = InferRequest("m", {"x": np.full((count, 2), number, np.float32)}, "1", id=str(number))
            self._held.append(batcher.submit(request, count, None, lambda outcome, n=number: self._got(n, outcome)))
        instance.start()
        await batcher.drain()
        batcher.stop()
        instance.join(10)
        await asyncio.sleep(0)
        self.statistics = batcher.statistics

    def _got(self, number: int, outcome: Outcome) -> None:
        self.outcomes[number].append(outcome)
        if len(self.outcomes[number]) == self._cancel_at:
            self._held[number].cancel()


def test_a_decoupled_model_gives_each_request_its_own_answers_and_an_empty_last_one() -> None:
    model = FakeStreamingModel()
    streams = Streams(model, [3, 0, 200, 1])
    for number, (count, outcomes) in enumerate(zip([3, 0, 200, 1], streams.outcomes, strict=True)):
        assert all(isinstance(outcome, InferResponse) and outcome.id == str(number) for outcome in outcomes)
        *answers, last = [outcome for outcome in outcomes if isinstance(outcome, InferResponse)]
        assert len(answers) == count
        assert not any(answer.final for answer in answers)
        assert all((answer.outputs["y"] == 2 * number).all() for answer in answers)
        assert last.final
        assert not last.outputs
    assert [len(call["x"]) for call in model.calls] == [3, 0, 200, 1]
    assert streams.statistics.success.count == streams.statistics.execution_count == 4
    assert streams.statistics.first_response.count == 3


def test_a_cancelled_stream_is_closed_and_the_model_goes_on_with_the_next() -> None:
    ended = threading.Event()

    def forever(inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        try:
            while True:
                yield {"y": inputs["x"]}
        finally:
            ended.set()

    model = FakeStreamingModel(stream=forever)
    streams = Streams(model, [1, 1], cancel_at=5)
    for outcomes in streams.outcomes:
        assert [type(outcome) for outcome in outcomes] == [InferResponse] * 5 + [Cancelled]
    assert ended.is_set()
    assert model.closed == 2
    assert streams.statistics.failures[Failure.CANCELED] == 2


def test_a_stream_that_fails_half_way_ends_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        yield {"y": inputs["x"]}
        raise ZeroDivisionError("engine bug")

    streams = Streams(FakeStreamingModel(stream=breaks), [1, 1])
    for outcomes in streams.outcomes:
        assert [type(outcome) for outcome in outcomes] == [InferResponse, PenstockError]
    assert "engine bug" in caplog.text
    assert streams.statistics.failures[Failure.BACKEND] == 2


def test_batches_are_recorded_with_their_times_and_reasons() -> None:
    async def main() -> ModelStatistics:
        batcher = DynamicBatcher(BatchingConfig(batchable=True, max_batch=2), asyncio.get_running_loop())
        instance = Instance("i", FakeModel(), batcher)
        for _ in range(3):
            request = InferRequest("m", {"x": np.ones((1, 2), np.float32)}, "1")
            batcher.submit(request, 1, None, lambda outcome: None)
        asyncio.get_running_loop().call_soon(instance.start)
        await batcher.drain()
        batcher.stop()
        instance.join(10)
        return batcher.statistics

    statistics = asyncio.run(main())
    assert {reason: count for reason, count in statistics.reasons.items() if count} == {Reason.FULL: 1, Reason.IDLE: 1}
    assert (statistics.success.count, statistics.inference_count, statistics.execution_count) == (3, 3, 2)
    assert statistics.compute_infer_ns > 0
    assert statistics.success.ns >= statistics.queue_ns + statistics.compute_infer_ns


SIZED = Signature((TensorSpec("x", DataType.FP32, (1, 2)),), (TensorSpec("y", DataType.FP32, (1, 2)),))


@pytest.mark.parametrize(
    ("model", "batchable", "expected"),
    [
        (FakeModel(predictable=True), True, 1),
        (FakeModel(), True, 0),
        (FakeModel(predictable=True), False, 0),
        (FakeModel(SIZED, predictable=True), False, 1),
    ],
    ids=["predictable", "not", "any size and never told apart", "one size"],
)
def test_only_what_takes_equally_long_for_equal_shapes_may_run_on_the_loop(
    model: FakeModel, batchable: bool, expected: int
) -> None:
    async def main() -> int:
        batcher = DynamicBatcher(BatchingConfig(batchable=batchable), asyncio.get_running_loop())
        instance = Instance("i", model, batcher)
        instance.start()
        runners = len(batcher._runners)
        batcher.stop()
        instance.join(10)
        assert not batcher._runners
        return runners

    assert asyncio.run(main()) == expected
