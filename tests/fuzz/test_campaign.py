"""Fuzzing in slices: some thousands of messages for each target in seconds, and many more where there is time."""

from __future__ import annotations

import multiprocessing
from contextlib import closing

import pytest

from tests.fuzz.campaign import TARGETS, Finding, Report, make_target, run, run_target
from tests.fuzz.mutator import Mutator, Random

_SLICES = {"http": 3000, "h2": 3000, "coded": 3000}
_SLICE = 8000
_MANY = 200_000
_GROWTH_BYTES = 8 << 20
_GROWTH_OBJECTS = 5000


def check(report: Report) -> None:
    assert report.grown_bytes < _GROWTH_BYTES, report
    assert report.grown_objects < _GROWTH_OBJECTS, report


@pytest.mark.parametrize("name", TARGETS)
def test_a_slice(name: str) -> None:
    run(name, _SLICES.get(name, _SLICE), seed=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TARGETS)
def test_many_messages_leave_nothing_behind(name: str) -> None:
    # In a process of its own, so that nothing else takes or gives back memory.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        report = pool.apply(run, (name, _MANY, 1))
    check(report)


def test_the_same_seed_makes_the_same_messages() -> None:
    with closing(make_target("oip")) as target:
        drawn = [
            [target.join(mutator.draw(), mutator.random) for _ in range(300)]
            for mutator in (Mutator(target.seeds, target.tokens, Random(7)) for _ in range(2))
        ]
    assert drawn[0] == drawn[1]
    valid = {b"".join(seed) for seed in target.seeds}
    assert len(set(drawn[0]) - valid) > 250


class _Bad:
    """A target with a bug."""

    seeds = ((b"valid",),)
    tokens = ()

    def join(self, parts: list[bytes], random: Random) -> bytes:
        return b"".join(parts)

    def run(self, data: bytes) -> None:
        if not data.startswith(b"va"):
            raise KeyError("a bug")

    def close(self) -> None:
        pass


def test_what_does_harm_is_told_with_what_repeats_it() -> None:
    with pytest.raises(Finding, match=r"bad, seed 3, message \d+: KeyError: 'a bug'") as found:
        run_target("bad", _Bad(), 1000, 3)
    with pytest.raises(KeyError):
        _Bad().run(found.value.data)


def test_what_never_ends_is_ended() -> None:
    class Endless(_Bad):
        def run(self, data: bytes) -> None:
            while True:
                pass

    with pytest.raises(Finding, match="TimeoutError"):
        run_target("endless", Endless(), 1, 0, limit_s=0.05)
