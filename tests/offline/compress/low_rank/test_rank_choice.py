"""The choice of ranks, compared with every possible choice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.offline.compress.low_rank.rank_choice import RankChoice, frontier, furthest, path, price

CHOICES = st.lists(
    st.builds(RankChoice, ms=st.integers(1, 50).map(float), error=st.integers(1, 50).map(float)), min_size=0, max_size=8
).map(lambda found: [RankChoice(60.0, 0.0), *found])


@given(CHOICES)
def test_a_frontier_is_undominated_and_convex(choices: list[RankChoice]) -> None:
    best = frontier(choices)
    assert best[0] == RankChoice(60.0, 0.0)
    for one, two in itertools.pairwise(best):
        assert two.ms < one.ms
        assert two.error > one.error
    assert best[-1].ms == min(choice.ms for choice in choices)
    prices = [price(one, two) for one, two in itertools.pairwise(best)]
    assert prices == sorted(prices)
    for choice in choices:
        # No choice lies below a line between two neighbours.
        for one, two in itertools.pairwise(best):
            if two.ms <= choice.ms <= one.ms:
                assert choice.error >= one.error + price(one, two) * (one.ms - choice.ms) - 1e-9


@given(st.lists(CHOICES, min_size=1, max_size=3))
def test_every_stop_is_the_least_error_for_its_time(options: list[list[RankChoice]]) -> None:
    fronts = [frontier(choices) for choices in options]
    everything = [
        (sum(choice.ms for choice in each), sum(choice.error for choice in each))
        for each in itertools.product(*options)
    ]
    stops = path(fronts)
    assert stops[0] == (0,) * len(options)
    assert stops[-1] == tuple(len(front) - 1 for front in fronts)
    for stop in stops:
        chosen = [front[at] for front, at in zip(fronts, stop, strict=True)]
        ms, error = sum(choice.ms for choice in chosen), sum(choice.error for choice in chosen)
        assert error <= min(error for other, error in everything if other <= ms) + 1e-9


@given(st.integers(1, 200), st.integers(0, 200))
def test_furthest_finds_the_last_accepted_in_few_questions(count: int, last: int) -> None:
    asked = []

    def accept(stop: int) -> bool:
        asked.append(stop)
        return stop <= last

    assert furthest(count, accept) == min(last, count - 1)
    assert len(asked) <= count.bit_length() + 1
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_accepted_is_the_first_stop(count: int) -> None:
    assert furthest(count, lambda _stop: False) == 0
