import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError, Unavailable
from penstock.online.scheduler.batch import merge, split
from penstock.online.scheduler.dynamic_batcher import BatchingConfig, DynamicBatcher, Waiting, form
from penstock.online.scheduler.instance import Instance
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.testing import FakeModel, double


def make_request(value: float, rows: int, width: int = 2) -> InferRequest:
    return InferRequest("m", {"x": np.full((rows, width), value, np.float32)}, "1")


def waiting(number: int, rows: int, key: object = None) -> Waiting:
    return Waiting(number, make_request(number, rows), rows, key, lambda outcome: None)


def test_form_waits_when_nothing_is_there() -> None:
    assert form({}, 8) is None


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from("abc")), min_size=1, max_size=40))
def test_form_takes_the_oldest_and_what_fits_behind_it(arrivals: list[tuple[int, str]]) -> None:
    queues: dict[str, list[Waiting]] = {}
    for number, (rows, key) in enumerate(arrivals):
        queues.setdefault(key, []).append(waiting(number, rows, key))
    while formed := form(queues, 8):
        queue = queues[formed.key]
        taken, rest = queue[: formed.count], queue[formed.count :]
        assert taken[0].number == min(w.number for q in queues.values() for w in q)
        assert formed.count == 1 or sum(w.rows for w in taken) <= 8
        assert taken
        assert not rest or sum(w.rows for w in taken) + rest[0].rows > 8
        queues[formed.key] = rest
        if not rest:
            del queues[formed.key]
    assert not queues


class Turns:
    """Stands for the event loop: holds what was to be called soon until ``turn``."""

    def __init__(self) -> None:
        self._due: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        self._due.append((callback, args))

    call_soon_threadsafe = call_soon

    def turn(self) -> None:
        due, self._due = self._due, []
        for callback, args in due:
            callback(*args)


STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 6), st.integers(2, 3)),
    st.tuples(st.just("turn"), st.just(0), st.just(0)),
    st.tuples(st.just("take"), st.just(0), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("fail"), st.integers(0, 9), st.just(0)),
)


@settings(max_examples=400)
@given(st.lists(STEPS, max_size=60))
def test_any_interleaving_answers_each_request_once_and_with_its_own_result(steps: list[tuple[str, int, int]]) -> None:
    loop = Turns()
    batcher = DynamicBatcher(BatchingConfig(batchable=True, max_batch=6, max_queue=20), loop)  # type: ignore[arg-type]
    sent: dict[int, tuple[int, int]] = {}
    outcomes: dict[int, list[Outcome]] = {}
    running: list[list[Waiting]] = []
    pending, on_loop, failed = 0, 0, 0  # submitted; handed over by a turn and not yet taken

    def finish(batch: list[Waiting], error: PenstockError | None) -> None:
        outputs = double(merge([w.request.inputs for w in batch]))
        batcher.finish(batch, error or split(outputs, [w.rows for w in batch]))

    for number, (step, a, b) in enumerate(steps):
        if step == "submit":
            full = sum(1 for n in sent if not outcomes[n]) >= 20
            outcomes[number] = []
            try:
                batcher.submit(make_request(number, a, b), a, b, outcomes[number].append)
                sent[number] = (a, b)
                pending += 1
                assert not full
            except Unavailable:
                assert full
                del outcomes[number]
        elif step == "turn":
            loop.turn()
            on_loop, pending = on_loop + pending, 0
        elif step == "take" and on_loop:
            batch = batcher.take()
            assert batch is not None
            assert sum(w.rows for w in batch) <= 6
            assert len({w.key for w in batch}) == 1
            on_loop -= len(batch)
            running.append(batch)
        elif step in ("finish", "fail") and running:
            batch = running.pop(a % len(running))
            failed += len(batch) * (step == "fail")
            finish(batch, PenstockError("broken") if step == "fail" else None)
    loop.turn()
    batcher.stop()
    for batch in [*running, *iter(batcher.take, None)]:
        finish(batch, None)
    loop.turn()
    assert count_errors(sent, outcomes) == failed


def count_errors(sent: dict[int, tuple[int, int]], outcomes: dict[int, list[Outcome]]) -> int:
    """Every request has one outcome, and if that is no error, its own."""
    errors = 0
    for number, shape in sent.items():
        (outcome,) = outcomes[number]
        if isinstance(outcome, InferResponse):
            np.testing.assert_array_equal(outcome.outputs["y"], np.full(shape, 2 * number, np.float32))
        else:
            errors += 1
    return errors


@pytest.mark.parametrize("instances", [1, 3])
def test_with_real_threads_every_request_gets_its_own_answer(instances: int) -> None:
    model = FakeModel(reentrant=True)

    async def main() -> list[Outcome]:
        loop = asyncio.get_running_loop()
        batcher = DynamicBatcher(BatchingConfig(batchable=True, max_batch=16), loop)
        crew = [Instance(f"i{n}", model, batcher) for n in range(instances)]
        for instance in crew:
            instance.start()
        outcomes: list[list[Outcome]] = [[] for _ in range(2000)]
        for number, outcome in enumerate(outcomes):
            rows = number % 5 + 1
            batcher.submit(make_request(number, rows), rows, None, outcome.append)
            if number % 7 == 0:
                await asyncio.sleep(0)
        await batcher.drain()
        batcher.stop()
        for instance in crew:
            instance.join(10)
        return [only for (only,) in outcomes]

    for number, outcome in enumerate(asyncio.run(main())):
        assert isinstance(outcome, InferResponse)
        np.testing.assert_array_equal(outcome.outputs["y"], np.full((number % 5 + 1, 2), 2 * number, np.float32))
    assert max(len(call["x"]) for call in model.calls) <= 16


def test_a_full_queue_refuses_at_once() -> None:
    batcher = DynamicBatcher(BatchingConfig(batchable=True, max_batch=4, max_queue=2), Turns())  # type: ignore[arg-type]
    for _ in range(2):
        batcher.submit(make_request(0, 1), 1, None, lambda outcome: None)
    with pytest.raises(Unavailable, match="queue of model 'm' is full"):
        batcher.submit(make_request(0, 1), 1, None, lambda outcome: None)


def test_a_model_that_cannot_be_batched_runs_one_request_at_a_time() -> None:
    loop = Turns()
    batcher = DynamicBatcher(BatchingConfig(batchable=False), loop)  # type: ignore[arg-type]
    for _ in range(3):
        batcher.submit(make_request(0, 4), 1, None, lambda outcome: None)
    loop.turn()
    assert [len(batcher.take() or []) for _ in range(3)] == [1, 1, 1]


def test_a_receiver_that_fails_does_not_keep_the_others_from_their_answers() -> None:
    loop = Turns()
    batcher = DynamicBatcher(BatchingConfig(batchable=True, max_batch=8), loop)  # type: ignore[arg-type]
    received: list[Outcome] = []

    def broken(outcome: Outcome) -> None:
        raise RuntimeError("receiver")

    batcher.submit(make_request(1, 1), 1, None, broken)
    batcher.submit(make_request(2, 1), 1, None, received.append)
    loop.turn()
    batch = batcher.take()
    assert batch is not None
    batcher.finish(batch, PenstockError("broken"))
    loop.turn()
    assert len(received) == 1


def test_an_answer_that_comes_after_the_event_loop_was_closed_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    batcher = DynamicBatcher(BatchingConfig(batchable=False), loop)
    loop.close()
    batcher.finish([waiting(1, 1)], [{}])
