"""The trimming of arenas after large runs, in manual time."""

import threading
import weakref

import pytest

from penstock.clock import ManualClock
from penstock.engines import arena as arena_module
from penstock.engines.arena import TRIM_S, ArenaTrimmer

PATIENCE_S = 60


class Arena:
    """An arena in manual time; counts its trims, and the threads that would be started."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.trims = self.starts = 0
        self.trimmer = ArenaTrimmer(self.trim, self.clock, self.start)

    def trim(self) -> None:
        self.trims += 1

    def start(self, trimmer: ArenaTrimmer) -> None:
        self.starts += 1


@pytest.fixture
def arena() -> Arena:
    return Arena()


def test_large_runs_that_follow_one_another_keep_the_memory(arena: Arena) -> None:
    for _ in range(20):
        arena.trimmer.note_large()
        arena.clock.advance(TRIM_S[0] - 1)
        assert arena.trimmer.next_wait() == 1
    assert (arena.trims, arena.starts) == (0, 1)
    arena.clock.advance(1)
    assert arena.trimmer.next_wait() == TRIM_S[1] - TRIM_S[0]
    assert arena.trims == 1


def test_later_trims_release_the_memory_of_answers_that_were_read_late(arena: Arena) -> None:
    for round_number in (1, 2):
        arena.trimmer.note_large()
        waits = []
        while (wait := arena.trimmer.next_wait()) is not None:
            waits.append(wait)
            arena.clock.advance(wait)
        assert waits == [later - earlier for earlier, later in zip((0, *TRIM_S), TRIM_S, strict=False)]
        assert (arena.trims, arena.starts) == (round_number * len(TRIM_S), round_number)


def test_a_large_run_starts_over(arena: Arena) -> None:
    arena.trimmer.note_large()
    arena.clock.advance(TRIM_S[0])
    assert arena.trimmer.next_wait() == TRIM_S[1] - TRIM_S[0]
    arena.trimmer.note_large()
    assert arena.trimmer.next_wait() == TRIM_S[0]
    assert (arena.trims, arena.starts) == (1, 1)


def test_a_thread_trims_and_ends() -> None:
    clock, trimmed = ManualClock(), threading.Semaphore(0)

    def trim() -> None:
        trimmed.release()

    class Passing(ManualClock):
        """At each look, all trims are due that come after the last large run."""

        def now(self) -> float:
            clock.advance(TRIM_S[-1])
            return clock.now()

    trimmer = ArenaTrimmer(trim, Passing())
    for _ in range(3):
        trimmer.note_large()
        for _ in TRIM_S:
            assert trimmed.acquire(timeout=PATIENCE_S)
    trimmer.close()
    trimmer.note_large()
    assert not trimmed.acquire(blocking=False)


def test_a_large_run_after_a_trim_does_not_wait_for_the_later_trims(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = threading.Semaphore(0)
    monkeypatch.setattr(arena_module, "TRIM_S", (0.0, 1e6, 2e6))
    trimmer = ArenaTrimmer(trimmed.release)
    for _ in range(3):
        trimmer.note_large()
        assert trimmed.acquire(timeout=PATIENCE_S)
    trimmer.close()


def test_the_thread_does_not_keep_a_dropped_model() -> None:
    trimmer, done = ArenaTrimmer(int, ManualClock()), threading.Event()
    trimmer.note_large()
    weakref.finalize(trimmer, done.set)
    del trimmer
    assert done.wait(PATIENCE_S)
