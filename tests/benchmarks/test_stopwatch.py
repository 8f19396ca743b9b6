"""Each stage gets its own time, without that of the stages that it calls."""

from __future__ import annotations

import threading

import pytest

from benchmarks.stopwatch import Stopwatch


class Clock(threading.local):
    """A clock for each thread, which stands unless it is moved."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Work:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def outer(self) -> int:
        self.clock.now_ns += 2
        return self.inner() + self.inner()

    def inner(self) -> int:
        self.clock.now_ns += 50
        return 1

    def fail(self) -> None:
        self.clock.now_ns += 7
        raise KeyError


def test_a_stage_has_its_own_time_only() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.watching([("outer", Work, "outer"), ("inner", Work, "inner")]):
        assert Work(clock).outer() == 2
    assert watch.calls == {"outer": 1, "inner": 2}
    assert watch.total_ns == {"outer": 2, "inner": 100}


def test_functions_are_given_back() -> None:
    clock = Clock()
    watch, before = Stopwatch(clock), Work.fail
    with pytest.raises(KeyError), watch.watching([("fail", Work, "fail")]):
        Work(clock).fail()
    assert Work.fail is before
    assert watch.total_ns == {"fail": 7}


def test_functions_of_one_stage_add_up() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.watching([("all", Work, "outer"), ("all", Work, "inner")]):
        Work(clock).outer()
    assert (watch.calls, watch.total_ns) == ({"all": 3}, {"all": 102})


def test_threads_have_stacks_of_their_own() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.watching([("outer", Work, "outer"), ("inner", Work, "inner")]):
        threads = [threading.Thread(target=Work(clock).outer) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert watch.total_ns == {"outer": 6, "inner": 300}


def test_clearing_forgets() -> None:
    watch = Stopwatch()
    watch.timed("stage", lambda: None)()
    watch.clear()
    assert not watch.total_ns
    assert not watch.calls


def test_what_watching_costs_is_taken_off() -> None:
    """A clock that moves with each look: then a bare call takes nothing, and all of a watched one is the watching."""

    class Looks:
        count = 0

        def __call__(self) -> int:
            self.count += 10
            return self.count

    watch = Stopwatch(Looks())
    wrapped = watch.timed("nothing", lambda: None)
    for _ in range(100):
        wrapped()
    assert watch.total_ns["nothing"] == pytest.approx(0, abs=1)
