"""Threads that run stages."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import pytest

from penstock.errors import InvalidInput, PenstockError
from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.fairness import Flows, Item
from penstock.pipeline.streaming.memory import Memory
from penstock.pipeline.streaming.stage import Inputs, StageCall, StageSpec
from penstock.pipeline.streaming.workers import Workers

TIMEOUT_S = 30
FLOWS = Flows()
FLOW = FLOWS.enter(None)


def doubled(items: Sequence[Inputs]) -> list[Told]:
    return [{"y": item["x"] * 2} if item["x"] else InvalidInput("0") for item in items]


def now(callback: Callable[[], None]) -> None:
    callback()


def test_the_calling_thread_runs_what_is_ready() -> None:
    told: list[Told] = []
    workers = Workers({"a": StageSpec("a", doubled)}, now, Memory(1 << 30), FLOWS, lambda: False)
    for value in (1, 0, 2):
        workers.add("a", StageCall(Item(value, FLOW), {"x": value}, told.append))
    assert not workers.is_empty
    workers.run_ready()
    assert workers.is_empty
    assert told[0] == {"y": 2}
    assert isinstance(told[1], InvalidInput)
    assert told[2] == {"y": 4}


def test_threads_run_until_they_are_stopped() -> None:
    told, lock, all_told = list[Told](), threading.Lock(), threading.Event()

    def post(callback: Callable[[], None]) -> None:
        with lock:
            callback()
            if len(told) == 100:
                all_told.set()

    with Workers(
        {"a": StageSpec("a", doubled, limit=0)}, post, Memory(1 << 30), FLOWS, lambda: False, threads=3
    ) as workers:
        for value in range(1, 101):
            workers.add("a", StageCall(Item(value, FLOW), {"x": value}, told.append))
        assert all_told.wait(TIMEOUT_S)
    workers.stop()
    found = [one["y"] for one in told if not isinstance(one, PenstockError)]
    assert sorted(found) == list(range(2, 202, 2))


def test_a_step_that_fails_gives_every_call_an_error(caplog: pytest.LogCaptureFixture) -> None:
    def fail(items: Sequence[Inputs]) -> list[Told]:
        raise ZeroDivisionError

    told: list[Told] = []
    workers = Workers({"a": StageSpec("a", fail)}, now, Memory(1 << 30), FLOWS, lambda: False)
    workers.add("a", StageCall(Item(0, FLOW), {}, told.append))
    workers.run_ready()
    assert [one.message for one in told if isinstance(one, PenstockError)] == ["internal error"]
    assert "step 'a' failed" in caplog.text


def test_a_cancelled_call_is_told_nothing() -> None:
    told: list[Told] = []
    workers = Workers({"a": StageSpec("a", doubled)}, now, Memory(1 << 30), FLOWS, lambda: False)
    workers.add("a", call := StageCall(Item(0, FLOW), {"x": 1}, told.append))
    batch = workers.take()
    assert batch is not None
    call.cancel()
    workers.finish(batch, doubled(batch.inputs))
    assert told == []
    assert workers.is_empty


def test_a_thread_whose_step_never_returns_is_replaced_once_its_item_is_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time_s, entered, go = [0.0], threading.Semaphore(0), threading.Event()

    def run(items: Sequence[Inputs]) -> list[Told]:
        if items[0]["x"] < 0:
            entered.release()
            assert go.wait(TIMEOUT_S)
        return [*items]

    told: queue.SimpleQueue[Told] = queue.SimpleQueue()
    memory = Memory(1 << 30)
    with Workers({"a": StageSpec("a", run)}, now, memory, FLOWS, lambda: False, 2, now=lambda: time_s[0]) as workers:
        stuck = [StageCall(Item(value, FLOW), {"x": -1}, told.put) for value in range(2)]
        for call in stuck:
            workers.add("a", call)
            assert entered.acquire(timeout=TIMEOUT_S)
        workers.add("a", StageCall(Item(3, FLOW), {"x": 3}, told.put))
        stuck[0].cancel()
        time_s[0] = 9.0
        workers.look_again()
        assert told.empty()
        time_s[0] = 11.0
        workers.look_again()
        assert told.get(timeout=TIMEOUT_S) == {"x": 3}
        assert "has not returned 10 s after it began" in caplog.text
        go.set()
        assert told.get(timeout=TIMEOUT_S) == {"x": -1}, "the other was not cancelled"
        for value in range(20):
            workers.add("a", StageCall(Item(value, FLOW), {"x": value}, told.put))
        assert [told.get(timeout=TIMEOUT_S)["x"] >= 0 for _ in range(20)] == [True] * 20  # type: ignore[index]
    assert not [one.name for one in threading.enumerate() if one.name.startswith("penstock-worker")]
