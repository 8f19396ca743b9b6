import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidConfig
from penstock.online.scheduler.rate_limiter import RateLimiter, ResourceGate, read_resources


def gates(limiter: RateLimiter, *needs: dict[str, int], priority: int = 0) -> list[ResourceGate]:
    found = []
    for one in needs:
        gate = limiter.gate("m", one, priority)
        assert gate is not None
        gate.open()
        found.append(gate)
    return found


def ask(limiter: RateLimiter, *asked: ResourceGate) -> list[bool]:
    """Let each gate wait, as ``ResourceGate.enter`` does; return the gates that hold their resources."""
    for gate in asked:
        gate.ask()
    return [gate.held for gate in asked]


def test_an_instance_runs_only_while_it_holds_all_that_it_needs() -> None:
    limiter = RateLimiter({"R1": 4, "R2": 1})
    a, b, c = gates(limiter, {"R1": 3}, {"R1": 2, "R2": 1}, {"R2": 1})
    assert ask(limiter, a, b, c) == [True, False, False], "c would take what b waits for"
    a.leave()
    assert [b.held, c.held] == [True, False]
    b.leave()
    assert c.held


def test_of_each_resource_there_is_as_much_as_the_neediest_instance_needs() -> None:
    limiter = RateLimiter()
    small, other, large = gates(limiter, {"R1": 1}, {"R1": 1}, {"R1": 2})
    assert ask(limiter, small, other) == [True, True]
    large.close()
    other.leave()
    assert ask(limiter, other) == [False], "with the neediest gone, there is one"
    small.leave()
    assert other.held


def test_instances_without_resources_have_no_gate() -> None:
    assert RateLimiter().gate("m", {}) is None


def test_who_needs_more_than_there_is_is_refused() -> None:
    with pytest.raises(
        InvalidConfig, match="model 'm': Resource count for \"R1\" is limited to 3 .* minimum required count is 4"
    ):
        RateLimiter({"R1": 3}).gate("m", {"R1": 4})
    with pytest.raises(InvalidConfig, match='"R2" is limited to 0'):
        RateLimiter({"R1": 3}).gate("m", {"R2": 1})


@pytest.mark.parametrize("priorities", [(1, 2), (1, 2, 4), (3, 1, 1), (0, 5)])
def test_who_has_priority_n_runs_once_where_others_run_n_times(priorities: tuple[int, ...]) -> None:
    limiter = RateLimiter({"R": 1})
    waiting = [gates(limiter, {"R": 1}, priority=priority)[0] for priority in priorities]
    ask(limiter, *waiting)
    runs: Counter[int] = Counter()
    rounds = 2000
    for _ in range(rounds):
        (number,) = (number for number, gate in enumerate(waiting) if gate.held)
        runs[number] += 1
        waiting[number].ask()  # it has more to do
    shares = [1 / max(1, priority) for priority in priorities]
    for number, share in enumerate(shares):
        assert runs[number] == pytest.approx(rounds * share / sum(shares), abs=2)


def test_whoever_rested_is_not_paid_back_for_it() -> None:
    limiter = RateLimiter({"R": 1})
    busy, late = gates(limiter, {"R": 1}, {"R": 1})
    for _ in range(100):
        busy.ask()
    late.ask()
    order = []
    for _ in range(6):
        holder = busy if busy.held else late
        order.append(holder is busy)
        holder.ask()
    assert sum(order) == 3


def test_a_turn_that_was_not_used_is_kept() -> None:
    limiter = RateLimiter({"R": 1})
    (gate,) = gates(limiter, {"R": 1}, priority=5)
    gate.enter()
    gate.leave(unused=True)
    assert gate.turn == 0
    gate.enter()
    gate.leave()
    assert gate.turn == 5


def test_who_needs_much_is_not_starved_by_many_who_need_little() -> None:
    limiter = RateLimiter({"R": 2})
    one, two, large = gates(limiter, {"R": 1}, {"R": 1}, {"R": 2})
    ask(limiter, one, two, large)
    one.ask()
    assert [one.held, two.held, large.held] == [False, True, False]
    two.ask()
    assert [one.held, two.held, large.held] == [False, False, True]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["enter", "leave", "close"])), max_size=60), st.data())
def test_never_more_is_held_than_there_is_and_in_the_end_everybody_has_run(
    moves: list[tuple[int, str]], data: st.DataObject
) -> None:
    available = {"A": 3, "B": 2}
    limiter = RateLimiter(available)
    need = st.fixed_dictionaries({"A": st.integers(1, 3)}, optional={"B": st.integers(1, 2)})
    everybody = gates(limiter, *data.draw(st.lists(need, min_size=6, max_size=6)))
    waiting: set[int] = set()
    for number, move in moves:
        gate = everybody[number]
        if number in waiting and not gate.held:
            continue  # its thread is blocked
        waiting.discard(number)
        if move == "enter":
            gate.ask()
            waiting.add(number)
        elif move == "leave":
            gate.leave()
        else:
            gate.close()
            gate.open()
        for name, most in available.items():
            assert sum(one.needs.get(name, 0) for one in everybody if one.held) <= most
    for _ in range(len(everybody) + 1):
        for number, gate in enumerate(everybody):
            if gate.held:
                waiting.discard(number)
                gate.leave()
    assert not waiting
    assert not +limiter.held
    assert not limiter.waiting


def test_threads_run_only_as_many_at_once_as_there_are_resources_for() -> None:
    limiter = RateLimiter({"R": 2})
    threads = 6
    together, most, lock = 0, 0, threading.Lock()

    def work(gate: ResourceGate) -> int:
        nonlocal together, most
        runs = 0
        for _ in range(50):
            gate.enter()
            with lock:
                together += 1
                most = max(most, together)
            runs += 1
            with lock:
                together -= 1
        gate.close()
        return runs

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(work, gates(limiter, *[{"R": 1}] * threads), timeout=60))
    assert done == [50] * threads
    assert 1 <= most <= 2
    assert not limiter.gates


def test_resources_are_read_from_options() -> None:
    assert read_resources(["R1:4", "R2:5:0", "R2:8:1", "a b:1"]) == {"R1": 4, "R2": 8, "a b": 1}


@pytest.mark.parametrize("text", ["", "R1", "R1:", ":4", "R1:x", "R1:-1", "R1:1:2:3", "R1:1:", "R1:" + "9" * 30])
def test_what_is_no_resource_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="is not a resource"):
        read_resources([text])
