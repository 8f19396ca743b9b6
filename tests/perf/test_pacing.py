"""Tests of penstock.perf.pacing."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from penstock.perf.load import run
from penstock.perf.pacing import PreciseTimer, poisson_arrivals


def test_gaps_are_exponential_and_follow_from_the_seed() -> None:
    times = list(itertools.islice(poisson_arrivals(50.0, seed=3), 20_000))
    gaps = np.diff([0.0, *times])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)  # as an exponential's: equal to its mean
    assert times == list(itertools.islice(poisson_arrivals(50.0, seed=3), 20_000))
    assert times[:9] != list(itertools.islice(poisson_arrivals(50.0, seed=4), 9))


@pytest.mark.parametrize("platform", ["linux", "other"])
def test_a_timer_calls_back_once_per_arming_and_not_after_close(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform == "other":
        monkeypatch.setattr("sys.platform", platform)

    async def main() -> int:
        calls, called = 0, asyncio.Event()

        def callback() -> None:
            nonlocal calls
            calls += 1
            called.set()

        timer = PreciseTimer(callback)
        timer.arm(60.0)
        timer.arm(0.001)  # instead of the minute
        await called.wait()
        called.clear()
        timer.arm(-1.0)  # late already: at once
        await called.wait()
        timer.arm(0.001)
        timer.close()
        timer.close()
        await asyncio.sleep(0.005)
        return calls

    assert run(main()) == 2
