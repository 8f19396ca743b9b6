"""Every request ends exactly once, for any behaviour of the receivers, and is counted."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.scheduler.answers import Answers
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.queue import Pending
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import BatchTimes, Failure, ModelStatistics, Reason

TIMES = BatchTimes(10, 20, 30, 40)


class Owner:
    def cancel(self, pending: Pending) -> None:
        raise AssertionError


class Requests:
    """Requests that wait at ``answers``, and the answer to each."""

    def __init__(self) -> None:
        self.statistics = ModelStatistics("m", "1")
        self.answers = Answers(self.statistics, lambda: 50)
        self.outcomes: list[list[Outcome]] = []

    def make(self, *outputs: str, raises: bool = False) -> Pending:
        outcomes: list[Outcome] = []
        self.outcomes.append(outcomes)

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            if raises:
                raise RuntimeError("a bug of the receiver")

        self.statistics.pending += 1
        return Pending(Owner(), 0, InferRequest("m", {}, "1", outputs=outputs), 1, None, done, 5)


def make_batch(*requests: Pending) -> Batch:
    return Batch(list(requests), len(requests), Reason.IDLE, 10)


@given(st.lists(st.sampled_from(("answered", "failed", "raising")), min_size=1, max_size=8))
def test_each_request_of_a_batch_ends_once(kinds: list[str]) -> None:
    logging.disable()  # the receivers' bugs are logged
    try:
        _end_each_once(kinds)
    finally:
        logging.disable(logging.NOTSET)


def _end_each_once(kinds: list[str]) -> None:
    requests = Requests()
    pending = [requests.make(raises=kind == "raising") for kind in kinds]
    for one, kind in zip(pending, kinds, strict=True):
        if kind == "failed":
            requests.answers.fail(one, PenstockError("cancelled"), Failure.CANCELED)
    outputs = [{"y": np.array([number])} for number in range(len(kinds))]
    requests.answers.give(make_batch(*pending), outputs, TIMES, 50)
    for one in pending:
        requests.answers.fail(one, PenstockError("too late"), Failure.BACKEND)
    assert [len(outcomes) for outcomes in requests.outcomes] == [1] * len(kinds)
    for number, (kind, (outcome,)) in enumerate(zip(kinds, requests.outcomes, strict=True)):
        assert isinstance(outcome, PenstockError) if kind == "failed" else outcome.outputs["y"] == number
    statistics = requests.answers.statistics
    assert statistics.pending == 0
    assert statistics.success.count == sum(kind != "failed" for kind in kinds)


def test_a_batch_that_failed_fails_all_its_requests() -> None:
    requests = Requests()
    requests.answers.give(make_batch(requests.make(), requests.make()), PenstockError("broken"), TIMES, 50)
    assert [str(outcome) for outcomes in requests.outcomes for outcome in outcomes] == ["broken", "broken"]
    assert requests.answers.statistics.failures[Failure.BACKEND] == 2


def test_clients_get_the_outputs_that_they_asked_for() -> None:
    requests = Requests()
    pending = [requests.make("b"), requests.make("none")]
    outputs = [{"a": np.zeros(1), "b": np.ones(1)}] * 2
    requests.answers.give(make_batch(*pending), outputs, TIMES, 50)
    (first,), (second,) = requests.outcomes
    assert isinstance(first, InferResponse)
    assert list(first.outputs) == ["b"]
    assert str(second) == "the model did not return the output 'none'"


def test_a_stream_ends_with_a_final_response_without_outputs() -> None:
    requests = Requests()
    pending, taken = requests.make(), []
    requests.answers.give_one(pending, {"y": np.zeros(1)}, 0, TIMES, lambda: taken.append(1))
    requests.answers.end_stream(make_batch(pending), None, 1, TIMES)
    first, last = requests.outcomes[0]
    assert isinstance(first, InferResponse)
    assert isinstance(last, InferResponse)
    assert (first.final, last.final, last.outputs, taken) == (False, True, {}, [1])


def test_a_cancelled_stream_sends_nothing_more() -> None:
    requests = Requests()
    pending, taken = requests.make(), []
    requests.answers.fail(pending, PenstockError("cancelled"), Failure.CANCELED)
    requests.answers.give_one(pending, {"y": np.zeros(1)}, 0, TIMES, lambda: taken.append(1))
    requests.answers.end_stream(make_batch(pending), None, 1, TIMES)
    assert [str(outcome) for outcome in requests.outcomes[0]] == ["cancelled"]
    assert taken == [1], "the model goes on"


def test_a_refused_request_is_counted() -> None:
    requests, error = Requests(), ResourceExhausted("the queue is full")
    assert requests.answers.refused(error) is error
    assert requests.answers.statistics.failures[Failure.REJECTED] == 1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_draining_waits_for_the_last_answer(count: int) -> None:
    async def run() -> None:
        requests = Requests()
        pending = [requests.make() for _ in range(count)]
        drained = asyncio.create_task(requests.answers.drain())
        for one in pending:
            await asyncio.sleep(0)
            assert not drained.done()
            requests.answers.fail(one, PenstockError("gone"), Failure.OTHER)
        await drained

    asyncio.run(run())
