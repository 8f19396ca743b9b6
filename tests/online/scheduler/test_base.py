"""Instances of a batch source start and end, and wait for their resources before a batch is formed."""

import asyncio
import queue
import threading
from collections.abc import Mapping

import numpy as np
import pytest

from penstock.online.instances.instance import Instance
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.rate_limiter import RateLimiter, ResourceGate
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.tensor import Array
from penstock.testing import FakeModel, double


def make_request(value: float) -> InferRequest:
    return InferRequest("m", {"x": np.full((1, 2), value, np.float32)})


def make_gates(limiter: RateLimiter, count: int, priority: int = 1) -> list[ResourceGate | None]:
    return [limiter.gate("m", {"R": 1}, priority) for _ in range(count)]


async def ask(batcher: DynamicBatcher, value: float = 1.0) -> None:
    answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    batcher.submit(make_request(value), 1, None, answer.set_result)
    outcome = await asyncio.wait_for(answer, 20)
    assert isinstance(outcome, InferResponse)
    np.testing.assert_array_equal(outcome.outputs["y"], np.full((1, 2), 2 * value, np.float32))


@pytest.mark.parametrize("predictable", [True, False], ids=["on the loop too", "on threads"])
def test_instances_are_added_and_dismissed_while_requests_are_answered(predictable: bool) -> None:
    async def main() -> None:
        batcher = DynamicBatcher(BatchingConfig(batchable=True, max_batch=4), asyncio.get_running_loop())
        gone: queue.SimpleQueue[Instance] = queue.SimpleQueue()
        started: list[Instance] = []

        def add() -> None:
            instance = Instance(f"i{len(started)}", FakeModel(predictable=predictable), batcher)
            started.append(instance)
            instance.start(gone.put)

        add()
        for round_ in range(20):
            add()
            for number in range(30):
                await ask(batcher, number + round_)
            batcher.dismiss()
            await ask(batcher)
            left = await asyncio.to_thread(gone.get, timeout=20)
            left.join(20)
            left.model.unload()  # a run on it would fail from now on
        assert len(batcher._runners) == predictable
        batcher.stop()
        last = await asyncio.to_thread(gone.get, timeout=20)
        last.join(20)
        assert gone.empty()

    asyncio.run(main())


def test_an_instance_that_is_dismissed_leaves_what_waits_to_the_others() -> None:
    entered, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def slow(inputs: Mapping[str, Array]) -> dict[str, Array]:
        entered.release()
        assert go_on.acquire(timeout=20)
        return double(inputs)

    async def main() -> None:
        batcher = DynamicBatcher(BatchingConfig(batchable=True, max_batch=1), asyncio.get_running_loop())
        crew = [Instance(f"i{n}", FakeModel(forward=slow), batcher) for n in range(2)]
        for instance in crew:
            instance.start()
        asked = [asyncio.ensure_future(ask(batcher, n)) for n in range(4)]
        for _ in crew:
            assert await asyncio.to_thread(entered.acquire, timeout=20)
        batcher.dismiss()
        go_on.release(4)
        await asyncio.gather(*asked)
        batcher.stop()
        for instance in crew:
            instance.join(20)
        assert sorted(len(instance.model.calls) for instance in crew) == [1, 3]  # type: ignore[union-attr]

    asyncio.run(main())


def test_requests_go_on_joining_while_an_instance_waits_for_its_resources() -> None:
    async def main() -> None:
        limiter, model = RateLimiter({"R": 1}), FakeModel(predictable=True)
        (other,) = make_gates(limiter, 1)
        (gate,) = make_gates(limiter, 1)
        assert other is not None
        other.open()
        other.enter()
        batcher = DynamicBatcher(BatchingConfig(batchable=True, max_batch=8), asyncio.get_running_loop())
        instance = Instance("i", model, batcher, gate)
        instance.start()
        asked = [asyncio.ensure_future(ask(batcher, 0.0))]
        async with asyncio.timeout(20):
            while not limiter.waiting:
                await asyncio.sleep(0)
        asked += [asyncio.ensure_future(ask(batcher, n)) for n in range(1, 5)]
        for _ in range(3):
            await asyncio.sleep(0)
        assert not model.calls
        other.leave()
        await asyncio.gather(*asked)
        assert [len(call["x"]) for call in model.calls] == [5]
        batcher.stop()
        instance.join(20)
        assert not +limiter.held
        assert limiter.gates == {other}

    asyncio.run(main())


@pytest.mark.parametrize("amount", [1, 2])
def test_across_models_no_more_run_at_once_than_their_resources_allow(amount: int) -> None:
    lock, together, most = threading.Lock(), 0, 0

    def watched(inputs: Mapping[str, Array]) -> dict[str, Array]:
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        outputs = double(inputs)
        with lock:
            together -= 1
        return outputs

    async def main() -> None:
        limiter, crew = RateLimiter({"R": amount}), []
        batchers = [
            DynamicBatcher(BatchingConfig(batchable=True, max_batch=2), asyncio.get_running_loop()) for _ in range(3)
        ]
        for batcher in batchers:
            for number, gate in enumerate(make_gates(limiter, 2)):
                crew.append(Instance(f"i{number}", FakeModel(forward=watched, predictable=True), batcher, gate))
                crew[-1].start()
        await asyncio.gather(*(ask(batcher, n) for n in range(200) for batcher in batchers))
        batchers[0].dismiss()
        await asyncio.gather(*(ask(batcher, n) for n in range(50) for batcher in batchers))
        for batcher in batchers:
            batcher.stop()
        for instance in crew:
            instance.join(20)
        assert not limiter.gates
        assert not limiter.waiting
        assert not +limiter.held

    asyncio.run(main())
    assert 1 <= most <= amount
