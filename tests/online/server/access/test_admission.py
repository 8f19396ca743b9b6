from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import ManualClock
from penstock.errors import Cancelled, Code, PenstockError, PermissionDenied, ResourceExhausted, Unauthenticated
from penstock.online.server.access.admission import Admission, ByteBudget, TokenBucket
from penstock.online.server.access.auth import Access
from penstock.request import Done, InferRequest, InferResponse, Outcome

KEY = "0123456789abcdef"
ANSWER = InferResponse("m", "1", {})


def request(client: str = "a", model: str = "m", **more: object) -> InferRequest:
    return InferRequest(model, {"x": np.zeros((1, 2), np.float32)}, client=client, **more)  # type: ignore[arg-type]


class Gate:
    """An Admission over a keys file with the one client ``a``."""

    def __init__(self, folder: Path, limits: str) -> None:
        self.path = folder / "keys.toml"
        self.clock = ManualClock()
        self.write(limits)
        self.access = Access(self.path, self.clock)
        self.admission = Admission(self.access, self.clock)
        self.outcomes: list[Outcome] = []

    def write(self, limits: str) -> None:
        self.path.write_text(f'[clients.a]\nkey = "{KEY}"\n{limits}')

    def reload(self, limits: str) -> None:
        self.write(limits + "\n# changed\n")
        self.clock.advance(1)
        self.access.identify(KEY.encode())

    def ask(self, client: str = "a") -> Done:
        self.admission.enter(client)
        return self.admission.admit(request(client), self.outcomes.append)

    def admits(self) -> bool:
        try:
            self.ask()
        except ResourceExhausted:
            return False
        return True


@given(
    rate=st.floats(0.01, 1000),
    burst=st.integers(1, 50),
    waits=st.lists(st.one_of(st.just(0.0), st.floats(0, 5)), max_size=200),
)
def test_no_span_of_time_lets_more_through_than_rate_and_burst(rate: float, burst: int, waits: list[float]) -> None:
    now, passed = 0.0, []
    bucket = TokenBucket(rate, burst, now)
    for wait in waits:
        now += wait
        if bucket.take(rate, burst, now) == 0:
            passed.append(now)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            assert last - first + 1 <= burst + rate * (passed[last] - passed[first]) + 1e-6


@given(rate=st.floats(0.01, 1000), burst=st.integers(1, 50), wait=st.floats(0, 1))
def test_a_refused_one_is_let_in_after_the_wait_that_it_was_told(rate: float, burst: int, wait: float) -> None:
    bucket = TokenBucket(rate, burst, 0.0)
    for _ in range(burst):
        assert bucket.take(rate, burst, 0.0) == 0
    told = bucket.take(rate, burst, wait)
    if told:
        assert bucket.take(rate, burst, wait + told * 0.5) > 0
        assert bucket.take(rate, burst, wait + told * (1 + 1e-9) + 1e-9) == 0


def test_a_client_that_sends_too_much_is_told_when_to_come_again(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "requests_per_second = 0.5\nburst = 2")
    assert [gate.admits() for _ in range(3)] == [True, True, False]
    with pytest.raises(ResourceExhausted) as caught:
        gate.ask()
    assert caught.value.retry_after_s == pytest.approx(2)
    gate.clock.advance(2)
    assert [gate.admits() for _ in range(2)] == [True, False]


def test_without_burst_it_is_one_second_s_worth(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "requests_per_second = 3.7")
    assert [gate.admits() for _ in range(4)] == [True, True, True, False]


def test_a_changed_rate_holds_at_once_and_gives_no_tokens_away(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "requests_per_second = 1\nburst = 3")
    assert [gate.admits() for _ in range(4)] == [True, True, True, False]
    gate.reload("requests_per_second = 1000\nburst = 1000")
    assert [gate.admits() for _ in range(3)] == [True, False, False]
    gate.clock.advance(1)
    assert sum(gate.admits() for _ in range(1100)) == 1000
    gate.reload("")
    assert all(gate.admits() for _ in range(1100))


def test_a_client_has_only_so_many_unanswered(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "max_concurrent = 2")
    first = gate.ask()
    second = gate.ask()
    assert not gate.admits()
    first(ANSWER)
    assert gate.admits()
    assert not gate.admits()
    second(Cancelled("gone"))
    second(Cancelled("gone"))  # a receiver that is called twice frees one place and no more
    assert [gate.admits(), gate.admits()] == [True, False]
    assert [type(outcome) for outcome in gate.outcomes] == [InferResponse, Cancelled, Cancelled]


def test_a_stream_counts_until_its_last_answer(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "max_concurrent = 1")
    done = gate.ask()
    done(InferResponse("m", "1", {}, final=False))
    assert not gate.admits()
    done(ANSWER)
    assert gate.admits()


def test_a_refused_request_takes_neither_place_nor_token(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "max_concurrent = 1\nrequests_per_second = 1\nburst = 2")
    done = gate.ask()
    assert not any(gate.admits() for _ in range(10))
    done(ANSWER)
    done = gate.ask()
    done(ANSWER)
    assert not gate.admits()  # no token
    gate.clock.advance(1)
    assert gate.admits()


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (request(model="other"), PermissionDenied),
        (request(priority=1), PermissionDenied),
        (request(client="nobody"), Unauthenticated),
    ],
)
def test_what_a_client_may_not_do(tmp_path: Path, asked: InferRequest, kind: type[PenstockError]) -> None:
    gate = Gate(tmp_path, 'models = ["m"]\nhighest_priority = 2')
    with pytest.raises(kind):
        gate.admission.admit(asked, gate.outcomes.append)
    for priority in (0, 2, 3):
        gate.admission.admit(request(priority=priority), gate.outcomes.append)


def test_without_keys_everybody_may_everything() -> None:
    clock, outcomes = ManualClock(), list[Outcome]()
    done = outcomes.append
    assert Admission(Access(None, clock), clock).admit(request(client="", priority=1), done) is done


@given(st.integers(1, 100), st.lists(st.integers(0, 120), max_size=60), st.randoms())
def test_a_byte_budget_is_kept_and_comes_back_whole(limit: int, wishes: list[int], random: object) -> None:
    budget, held = ByteBudget(limit), []
    for wish in wishes:
        room = budget.used + wish <= limit
        assert budget.take(wish) is room
        if room:
            held.append(wish)
        assert budget.used == sum(held) <= limit
        if held and random.random() < 0.4:  # type: ignore[attr-defined]
            budget.give(held.pop())
    for count in held:
        budget.give(count)
    assert budget.used == 0


def test_a_byte_budget_without_limit_and_its_refusal() -> None:
    budget = ByteBudget(0)
    assert budget.take(1 << 60)
    error = budget.refusal()
    assert (error.code, error.retry_after_s) == (Code.UNAVAILABLE, 1.0)


def test_the_fall_from_a_peak_is_told_once() -> None:
    falls: list[int] = []
    budget = ByteBudget(0, lambda: falls.append(budget.used))
    for size in (1 << 20, 40 << 20, 100 << 20):
        assert budget.take(size)
    budget.give(100 << 20)
    assert falls == []
    budget.give(30 << 20)
    assert falls == [11 << 20]
    budget.give(11 << 20)
    assert falls == [11 << 20, 0]
    assert budget.take(1 << 20)
    budget.give(1 << 20)
    assert falls == [11 << 20, 0]
