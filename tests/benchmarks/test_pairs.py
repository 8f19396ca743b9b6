"""The unit of a comparison is a load: what differs between loads widens the interval, and it covers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import pairs
from penstock.measurement import Interval


class World:
    """A clock that calls and pauses move on, and models whose speed changes with every load."""

    def __init__(self, seed: int) -> None:
        self.now, self.alive, self.rng = 0.0, 0, np.random.default_rng(seed)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def model(self, seconds: float) -> pairs.Load:
        @contextlib.contextmanager
        def load() -> Iterator[Callable[[], object]]:
            taken = seconds * np.exp(0.05 * self.rng.standard_normal())
            self.alive += 1
            assert self.alive <= 2, "more than the pair is loaded"
            yield lambda: self.sleep(taken)
            self.alive -= 1

        return load


def here(base: pairs.Load, other: pairs.Load, seconds: float, seeds: Sequence[int]) -> list[float]:
    return [pairs.ratio(base, other, seconds, seed) for seed in seeds]


@contextlib.contextmanager
def process_number(path: Path) -> Iterator[Callable[[], object]]:
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    yield lambda: time.sleep(1e-4)


def test_each_load_has_a_process_of_its_own(tmp_path: Path) -> None:
    found = pairs.versus(*(partial(process_number, tmp_path / name) for name in ("a", "b")), 0.03, loads=3)
    numbers = [(tmp_path / name).read_text().split() for name in ("a", "b")]
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0]) - {str(os.getpid())}) == 3
    assert 0.1 < found.value < 10


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, int], Interval]:
    def run(speedup: float, seed: int) -> Interval:
        world = World(seed)
        monkeypatch.setattr(pairs.time, "perf_counter", lambda: world.now)
        monkeypatch.setattr(pairs.time, "sleep", world.sleep)
        found = pairs.versus(world.model(1e-3), world.model(1e-3 / speedup), 0.4, ratios=here)
        assert world.alive == 0
        return found

    return run


def test_the_interval_covers_though_loads_differ(compare: Callable[[float, int], Interval]) -> None:
    found = [compare(1.3, seed) for seed in range(100)]
    assert sum(one.low <= 1.3 <= one.high for one in found) >= 90  # below this with 95 % coverage: 1 in 80
    assert np.mean([one.value for one in found]) == pytest.approx(1.3, rel=0.01)


def test_a_mean_of_ratios_is_narrower_than_each() -> None:
    assert pairs.geometric_mean([Interval(2, 1.9, 2.1), Interval(8, 7.6, 8.4)]).value == pytest.approx(4)
    one = Interval(2, 1.8, 2.25)
    many = pairs.geometric_mean([one] * 4)
    assert one.low < many.low < many.value < many.high < one.high


def test_more_loads_follow_until_the_interval_is_narrow() -> None:
    rng = np.random.default_rng(0)
    seen: list[int] = []

    def noisy(_base: object, _other: object, _seconds: float, seeds: Sequence[int]) -> list[float]:
        seen.extend(seeds)
        return np.exp(rng.normal(0, 0.03, len(seeds))).tolist()

    wide = pairs.versus(None, None, 1.0, ratios=noisy)
    assert seen == list(range(8))
    seen.clear()
    narrow = pairs.versus(None, None, 1.0, ratios=noisy, within=0.012)
    assert len(seen) > 8
    assert seen == list(range(len(seen)))
    assert narrow.high / narrow.low < wide.high / wide.low
    seen.clear()
    pairs.versus(None, None, 1.0, ratios=noisy, within=1e-9)
    assert len(seen) == 6 * 8
