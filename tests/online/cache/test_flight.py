"""Single flight through the cache: which requests run, wait, and leave."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import SystemClock
from penstock.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock.online.cache.response_cache import ResponseCache
from penstock.request import Deadline, Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import Failure, ModelStatistics

OUTPUTS = {"y": np.ones((1, 2), np.float32)}


class Run:
    """One run of the model, which the test ends. If cancelled, it ends with Cancelled, as in the scheduler."""

    def __init__(self, request: InferRequest, done: Done) -> None:
        self.request, self._done = request, done
        self.is_over = False

    def end(self, error: PenstockError | None = None) -> None:
        self.is_over = True
        self._done(error or InferResponse("m", "1", dict(OUTPUTS), self.request.id))

    def cancel(self) -> None:
        if not self.is_over:
            self.end(Cancelled("cancelled"))


class Asked:
    """One request and its outcome."""

    def __init__(self, bench: "Bench", id: str, deadline: Deadline | None) -> None:
        self.request = InferRequest("m", {"x": np.ones((1, 2), np.float32)}, "1", id, deadline=deadline)
        self.outcomes: list[Outcome] = []
        self.answered = asyncio.Event()
        self.pending = bench.model.answer(self.request, self._done, lambda done: bench.submit(self.request, done))

    @property
    def outcome(self) -> Outcome:
        (outcome,) = self.outcomes
        return outcome

    def cancel(self) -> None:
        if self.pending is not None:
            self.pending.cancel()

    def _done(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.answered.set()


class Bench:
    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.statistics = ModelStatistics()
        self.cache = ResponseCache(max_bytes, SystemClock())
        self.model = self.cache.of("digest", "1", self.statistics, 100)
        self.runs: list[Run] = []
        self.refusal: Exception | None = None

    def submit(self, request: InferRequest, done: Done) -> Run:
        if self.refusal is not None:
            raise self.refusal
        self.runs.append(Run(request, done))
        return self.runs[-1]

    def ask(self, count: int, deadline: Deadline | None = None) -> list[Asked]:
        return [Asked(self, str(number), deadline) for number in range(count)]


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


async def turn() -> None:
    """Run one iteration of the event loop."""
    await asyncio.sleep(0)


def is_answer(asked: Asked) -> bool:
    return isinstance(asked.outcome, InferResponse) and asked.outcome.id == asked.request.id


def test_a_follower_leaves_alone() -> None:
    bench = Bench()
    leader, follower, other = bench.ask(3)
    follower.cancel()
    follower.cancel()
    assert isinstance(follower.outcome, Cancelled)
    bench.runs[0].end()
    assert is_answer(leader)
    assert is_answer(other)
    assert (bench.statistics.hits.count, bench.statistics.failures[Failure.CANCELED]) == (1, 1)


def test_a_cancelled_leader_leaves_its_run_to_the_others() -> None:
    bench = Bench()
    leader, follower, other = bench.ask(3)
    leader.cancel()
    assert isinstance(leader.outcome, Cancelled)
    (only,) = bench.runs
    assert not only.is_over
    only.end()
    assert is_answer(follower)
    assert is_answer(other)
    # The scheduler counts the run, for whoever it came to be; the last one is a hit.
    assert (bench.statistics.hits.count, bench.statistics.failures[Failure.CANCELED]) == (1, 1)


def test_the_run_is_cancelled_when_nobody_waits_for_it() -> None:
    bench = Bench()
    asked = bench.ask(3)
    for each in asked:
        each.cancel()
    assert bench.runs[0].is_over
    assert all(isinstance(each.outcome, Cancelled) for each in asked)
    assert bench.statistics.failures[Failure.CANCELED] == 2  # and the scheduler counts the run
    (again,) = bench.ask(1)
    bench.runs[1].end()
    assert is_answer(again)


def test_an_answer_that_comes_after_all_have_left_is_kept() -> None:
    bench = Bench()
    (asked,) = bench.ask(1)
    bench.runs[0].is_over = True  # it is with the engine, and cannot be cancelled any more
    asked.cancel()
    (newer,) = bench.ask(1)
    bench.runs[0].end()
    assert isinstance(asked.outcome, Cancelled)
    (third,) = bench.ask(1)
    assert is_answer(third)
    assert not newer.outcomes
    bench.runs[1].end()
    assert is_answer(newer)


def test_an_error_of_the_leader_s_own_makes_the_next_one_the_leader() -> None:
    async def main() -> None:
        bench = Bench()
        asked = bench.ask(4)
        for number, error in enumerate((DeadlineExceeded("late"), Unavailable("full"), ResourceExhausted("much"))):
            bench.runs[-1].end(error)
            assert asked[number].outcome is error
            assert not asked[number + 1].outcomes
            await turn()
            assert len(bench.runs) == number + 2
            assert bench.runs[-1].request is asked[number + 1].request
        bench.runs[-1].end()
        assert is_answer(asked[3])
        assert bench.statistics.misses.count == 4

    run(main())


def test_a_run_that_outlived_its_leader_and_is_too_late_for_it_harms_nobody() -> None:
    async def main() -> None:
        bench = Bench()
        leader, follower = bench.ask(2)
        leader.cancel()
        bench.runs[0].end(DeadlineExceeded("the leader's"))
        await turn()
        assert not follower.outcomes
        bench.runs[1].end()
        assert is_answer(follower)

    run(main())


def test_an_error_of_the_request_s_content_is_everybody_s_and_not_kept() -> None:
    bench = Bench()
    for error in (InvalidArgument("value"), PenstockError("engine")):
        asked = bench.ask(3)
        bench.runs[-1].end(error)
        assert all(each.outcome is error for each in asked)
        assert len(bench.cache) == 0
    assert len(bench.runs) == 2
    assert (bench.statistics.failures[Failure.OTHER], bench.statistics.failures[Failure.BACKEND]) == (2, 2)


def test_thousands_that_the_queue_refuses_are_refused_one_by_one() -> None:
    async def main() -> None:
        bench = Bench()
        bench.model = bench.cache.of("digest", "1", bench.statistics, 5000)
        asked = bench.ask(3000)
        bench.refusal = Unavailable("full")
        bench.runs[0].end(Unavailable("full"))
        for each in asked:
            await each.answered.wait()
        assert {type(each.outcome) for each in asked} == {Unavailable}
        bench.refusal = None
        bench.ask(1)
        assert len(bench.runs) == 2

    run(main())


def test_a_refusal_at_once_is_answered() -> None:
    bench = Bench()
    bench.refusal = Unavailable("full")
    (asked,) = bench.ask(1)
    assert asked.outcome is bench.refusal
    assert asked.pending is None


def test_a_bug_in_submitting_is_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.refusal = TypeError("a bug")
    (asked,) = bench.ask(1)
    assert isinstance(asked.outcome, PenstockError)
    assert asked.outcome.message == "internal error"
    assert "a bug" in caplog.text


def test_a_follower_s_deadline_is_its_own() -> None:
    async def main() -> None:
        bench = Bench()
        (leader,) = bench.ask(1)
        hurried, patient = bench.ask(1, Deadline.after(0.001, SystemClock()))[0], bench.ask(1)[0]
        late = bench.ask(1, Deadline.after(-1, SystemClock()))[0]
        await hurried.answered.wait()
        await late.answered.wait()
        assert isinstance(hurried.outcome, DeadlineExceeded)
        assert isinstance(late.outcome, DeadlineExceeded)
        bench.runs[0].end()
        assert is_answer(leader)
        assert is_answer(patient)
        assert bench.statistics.failures[Failure.REJECTED] == 2

    run(main())


def test_an_answer_too_large_to_keep_is_still_everybody_s() -> None:
    bench = Bench(max_bytes=100)
    asked = bench.ask(3)
    bench.runs[0].end()
    assert all(is_answer(each) for each in asked)
    assert len(bench.cache) == 0
    arrays = [each.outcome.outputs["y"] for each in asked]  # type: ignore[union-attr]
    assert not np.shares_memory(arrays[0], arrays[1])
    assert not arrays[1].flags.writeable


def test_an_answer_that_cannot_be_kept_is_still_everybody_s(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    asked = bench.ask(2)
    bench.runs[0]._done(InferResponse("m", "1", dict(OUTPUTS), "0", {"odd": [1]}))
    assert all(is_answer(each) for each in asked)
    assert "cannot be cached" in caplog.text


def test_a_receiver_may_cancel_and_ask_while_it_is_answered() -> None:
    bench = Bench()
    leader, first, second = bench.ask(3)
    more: list[Asked] = []

    def meddle(outcome: Outcome) -> None:
        leader.outcomes.append(outcome)
        first.cancel()
        second.cancel()
        more.extend(bench.ask(1))

    leader.pending.done = meddle  # type: ignore[union-attr]
    bench.runs[0].end()
    assert all(is_answer(each) for each in (leader, first, second, *more))
    assert len(bench.runs) == 1


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("end"), st.sampled_from([None, DeadlineExceeded, Unavailable, InvalidArgument, Cancelled])),
    st.tuples(st.just("turn"), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=40))
def test_whatever_happens_each_is_answered_once_and_at_most_one_run_is_under_way(
    actions: list[tuple[str, Any]],
) -> None:
    async def main() -> None:
        bench, asked = Bench(), list[Asked]()
        for action, value in actions:
            under_way = [each for each in bench.runs if not each.is_over]
            assert len(under_way) <= 1
            if action == "ask":
                asked += bench.ask(1)
            elif action == "cancel" and value < len(asked):
                asked[value].cancel()
            elif action == "end" and under_way:
                under_way[0].end(value("ended") if value else None)
            elif action == "turn":
                await turn()
        await turn()
        while under_way := [each for each in bench.runs if not each.is_over]:
            under_way[0].end()
            await turn()
        assert all(len(each.outcomes) == 1 for each in asked)
        assert bench.model._waiting == 0
        assert not bench.model._flights
        answers = sum(isinstance(each.outcome, InferResponse) for each in asked)
        assert bench.statistics.hits.count >= answers - len(bench.runs)

    run(main())


@given(st.integers(1, 50))
def test_any_number_of_equal_requests_run_once(count: int) -> None:
    bench = Bench()
    asked = bench.ask(count)
    bench.runs[0].end()
    assert len(bench.runs) == 1
    assert all(is_answer(each) for each in [*asked, *bench.ask(3)])
    assert len(bench.runs) == 1
