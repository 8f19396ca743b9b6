from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from ensembles import Gate
from handles import make_handle
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel


class Slow(FakeModel):
    """A model whose ``unload`` returns only after the event loop has run its pending callbacks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, unloaded: Counter[Slow]) -> None:
        super().__init__()
        self._loop, self._unloaded = loop, unloaded

    def unload(self) -> None:
        self._unloaded[self] += 1
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result()
        super().unload()


def test_unloading_while_an_instance_leaves_unloads_each_model_once() -> None:
    async def main() -> None:
        unloaded: Counter[Slow] = Counter()
        models = [Slow(asyncio.get_running_loop(), unloaded) for _ in range(4)]
        handle = make_handle(models[0])
        handle.start()
        handle.grow(models[1:])
        handle.shrink(4)
        for instance in tuple(handle._instances):
            instance.join(30)  # so that the event loop is told while the models are unloaded
        await handle.unload()
        assert unloaded == dict.fromkeys(models, 1)

    asyncio.run(main())


@pytest.mark.parametrize("is_held", [False, True])
def test_unloading_answers_requests_that_wait_for_others(is_held: bool) -> None:
    async def main() -> list[Outcome]:
        handle = make_handle(FakeModel(), settings={"dynamic_batching": {"max_queue_delay_microseconds": 10**12}})
        handle.start()
        outcomes: list[Outcome] = []
        if is_held:
            handle.hold()

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            if is_held:
                handle.release()

        handle.scheduler.submit(InferRequest("m", {"x": np.ones((1, 2), np.float32)}), 1, None, done)
        await asyncio.wait_for(handle.unload(), 20)
        return outcomes

    (outcome,) = asyncio.run(main())
    assert isinstance(outcome, InferResponse)


def test_a_newcomer_may_be_the_one_that_leaves() -> None:
    async def main() -> None:
        gate, newcomer = Gate(), FakeModel()
        handle = make_handle(FakeModel(forward=gate), max_batch=1)
        handle.start()
        handle.scheduler.submit(InferRequest("m", {"x": np.ones((1, 2), np.float32)}, "1"), 1, None, lambda _: None)
        await gate.entered()
        handle.shrink(1)
        handle.grow([newcomer])
        async with asyncio.timeout(30):
            while newcomer.loaded:
                await asyncio.sleep(0)
        assert handle.instance_count == 1
        gate.open()
        await handle.unload()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "made", "max_batch", "shape", "expected"),
    [
        ((-1, 1), (-1, 1000), 8, (3, 1), 3 * 4000),
        ((1,), (10, 1000), None, (1,), 40_000),
        ((-1, -1), (-1, 1000), 8, (2, 3), 8000),
        ((-1, -1), (-1, 1000), 8, (2, 1000), 0),  # as large as the request
        ((-1, 1000), (-1, 1000), 8, (2, 1000), 0),
        ((-1, 1), (-1, -1), 8, (2, 1), 0),  # not known
        ((), (1000,), None, (), 4000),
    ],
)
def test_answers_that_are_large_for_their_requests_are_foreseen(
    given: tuple[int, ...], made: tuple[int, ...], max_batch: int | None, shape: tuple[int, ...], expected: int
) -> None:
    async def main() -> None:
        spec = TensorSpec("x", DataType.FP32, given)
        model = FakeModel(Signature((spec,), (TensorSpec("y", DataType.FP32, made),)))
        handle = make_handle(model, max_batch=max_batch)
        assert handle.amplified_bytes(InferRequest("m", {"x": np.ones(shape, np.float32)}, "1")) == expected
        assert handle.amplified_bytes(InferRequest("m", {}, "1")) == 0

    asyncio.run(main())
