from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bundle.evidence import Accuracy
from penstock.measurement import Interval
from penstock.offline.compress.precision.ranking import first_ranked, rank_again, rank_groups, tiers
from penstock.offline.judge.judge import Judgement
from penstock.offline.judge.metrics import mean_interval

PLAYERS = "abcde"


class Game:
    """Trials of a model whose loss, the same in every sample, is a sum over single integer groups and pairs of them."""

    def __init__(self, single: dict[str, float], pairs: dict[str, float], samples: int = 50) -> None:
        self.single, self.pairs = single, pairs
        reference = SimpleNamespace(interval=mean_interval)
        self.judge = SimpleNamespace(reference=reference, data=SimpleNamespace(units=samples))
        self.mixed = SimpleNamespace(others=lambda name: frozenset(single) - {name}, is_integer=lambda floats: True)
        self.judge.baseline = self._outcome(frozenset(single))

    def loss(self, integer: Collection[str]) -> float:
        together = sum(loss for pair, loss in self.pairs.items() if set(pair) <= set(integer))
        return sum(self.single[name] for name in integer) + together

    def outcome(self, floats: Collection[str] = ()) -> Judgement:
        return self._outcome(frozenset(floats))

    def _outcome(self, floats: frozenset[str]) -> Judgement:
        loss = self.loss(frozenset(self.single) - floats)
        accuracy = Accuracy("fidelity", 1 - loss, Interval(loss, loss, loss), 0.0, self.judge.data.units)
        samples = np.full(self.judge.data.units, loss)
        return Judgement(accuracy, 1 - samples, samples)


def shapley(game: Game, name: str) -> float:
    """The definition: the mean, over all orders, of the group's contribution after the groups before it."""
    orders = list(itertools.permutations(game.single))
    total = 0.0
    for order in orders:
        before = order[: order.index(name)]
        total += game.loss([*before, name]) - game.loss(before)
    return total / len(orders)


losses = st.floats(-1, 1).map(lambda value: round(value, 3))


@given(
    st.fixed_dictionaries(dict.fromkeys(PLAYERS, losses)),
    st.dictionaries(st.sampled_from([a + b for a, b in itertools.combinations(PLAYERS, 2)]), losses, max_size=6),
)
def test_parts_are_shapley_values_where_groups_interact_in_pairs(single: dict, pairs: dict) -> None:
    game = Game(single, pairs)
    ranks = rank_groups(game, (), PLAYERS)
    assert sorted(rank.name for rank in ranks) == list(PLAYERS)
    for rank in ranks:
        assert rank.part.value == pytest.approx(shapley(game, rank.name), abs=1e-9)
        assert rank.divergence.value == pytest.approx(shapley(game, rank.name), abs=1e-9)
    assert sum(rank.part.value for rank in ranks) == pytest.approx(game.loss(PLAYERS), abs=1e-9)
    assert [rank.part.value for rank in ranks] == sorted((rank.part.value for rank in ranks), reverse=True)


def test_two_that_spoil_one_tensor_are_both_found() -> None:
    # Either alone loses 0.3, both together no more: leaving one of them float wins back nothing.
    game = Game({"a": 0.3, "b": 0.01, "c": 0.3, "d": 0.05, "e": 0.0}, {"ac": -0.3})
    ranks = rank_groups(game, (), PLAYERS)
    assert [rank.name for rank in ranks][:3] == ["a", "c", "d"]
    assert ranks[0].recovered.value == pytest.approx(0)
    assert ranks[0].alone is not None
    assert ranks[0].alone.value == pytest.approx(0.3)
    by_recovery = rank_groups(game, (), PLAYERS, with_alone=False)
    assert [rank.name for rank in by_recovery][:2] == ["d", "b"]
    assert by_recovery[0].alone is None


def test_errors_that_hide_one_another_are_found_one_after_another() -> None:
    # c undoes nine tenths of what a does; its own harm shows once a is float.
    game = Game({"a": 0.5, "b": 0.06, "c": 0.3, "d": 0.05, "e": 0.0}, {"ac": -0.6})
    ranks = rank_groups(game, (), PLAYERS)
    assert [rank.name for rank in ranks][:3] == ["a", "b", "d"]
    placed = first_ranked(game, ranks, 2)
    assert [rank.name for rank in placed] == ["a", "c", "b", "d", "e"]
    assert placed[1].expected == pytest.approx(0.3)
    assert placed[1].recovered == next(rank for rank in ranks if rank.name == "c").recovered
    assert rank_again(game, ["a"], ranks)[0].name == "a" or rank_again(game, ["a"], ranks)[0].name == "c"
    assert first_ranked(game, ranks, 0) == ranks
    assert sorted(rank.name for rank in first_ranked(game, ranks, 5)) == list(PLAYERS)


class NoisyGame(Game):
    """Hits of a hundred samples: a group loses the first ``single[name]`` of them; ``pairs`` gives the divergence."""

    def __init__(self, hits: dict[str, list[int]], divergences: dict[str, float]) -> None:
        self.hits, self.divergences = hits, divergences
        super().__init__(dict.fromkeys(hits, 0.0), {}, 100)

    def _outcome(self, floats: frozenset[str]) -> Judgement:
        integer = sorted(frozenset(self.single) - floats)
        scores = np.ones(100)
        for name in integer:
            scores[self.hits[name]] = 0
        loss = float(1 - scores.mean())
        divergence = np.full(100, sum(self.divergences[name] for name in integer))
        return Judgement(Accuracy("top-1", 1 - loss, Interval(loss, loss, loss), 0.0, 100), scores, divergence)


def test_what_accuracy_cannot_tell_apart_is_ranked_by_divergence() -> None:
    game = NoisyGame(
        {"a": [99], "b": list(range(40)), "c": [], "d": [98, 97]}, {"a": 0.3, "b": 0.01, "c": 0.5, "d": 0.1}
    )
    ranks = rank_groups(game, (), "abcd")
    assert [(rank.name, rank.by) for rank in ranks] == [
        ("b", "accuracy"),
        ("c", "divergence"),
        ("a", "divergence"),
        ("d", "divergence"),
    ]
    # What a, c and d win together, shared out by divergence.
    assert [rank.expected for rank in ranks] == pytest.approx([0.4, 0.03 * 5 / 9, 0.03 * 3 / 9, 0.03 * 1 / 9])


def test_where_nothing_is_lost_half_a_sample_is_shared_out() -> None:
    ranks = rank_groups(NoisyGame({"a": [], "b": []}, {"a": 0.0, "b": 0.0}), (), "ab")
    assert [rank.expected for rank in ranks] == pytest.approx([0.0025, 0.0025])


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 20)), st.integers(0, 10))
def test_tiers_hold_everything_once_and_nobody_behind_its_leader(gains: dict[str, int], reach: int) -> None:
    found = tiers(list(gains), gains, lambda leader, name: gains[leader] - gains[name] > reach)
    assert sorted(itertools.chain(*found)) == sorted(gains)
    for tier in found:
        top = max(gains[name] for name in tier)
        assert all(top - gains[name] <= reach for name in tier)
    assert len(found) <= math.ceil(21 / (reach + 1))
