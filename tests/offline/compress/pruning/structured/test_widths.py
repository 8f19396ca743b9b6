"""Widths are multiples of a block, and the greedy choice is the cheapest that saves enough."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from networks import cnn, mlp
from penstock.offline.compress.pruning.structured.coupling import ChannelGroup
from penstock.offline.compress.pruning.structured.cut import Structure
from penstock.offline.compress.pruning.structured.importance import by_norm
from penstock.offline.compress.pruning.structured.widths import Grid, best_units, fastest_for_least, make_grid, uniform


def _group(units: int, size: int = 1, frozen: tuple[int, ...] = ()) -> ChannelGroup:
    return ChannelGroup(("g",), np.arange(units), size, frozen, "fixed" if frozen else "")


@pytest.mark.parametrize(
    ("units", "size", "width", "kept"),
    [
        (64, 1, 0.75, 48),
        (64, 1, 0.7, 48),  # 45 channels would be slower
        (512, 1, 0.5, 256),
        (100, 1, 0.5, 48),
        (24, 1, 0.5, 12),  # under four blocks: steps of 4
        (3, 1, 0.3, 1),
        (12, 64, 0.75, 9),  # heads
        (32, 4, 0.6, 20),  # groups of a convolution, four make a block
        (64, 1, 0.01, 16),
        (64, 1, 1.0, 64),
    ],
)
def test_uniform_widths_are_multiples_of_blocks(units: int, size: int, width: float, kept: int) -> None:
    grid = make_grid(_group(units, size), 16, 0.0)
    assert min(units, grid.nearest(units * width)) == kept


@given(
    units=st.integers(1, 300),
    size=st.sampled_from([1, 4, 7, 64]),
    block=st.integers(1, 32),
    least=st.floats(0, 1),
    frozen=st.integers(0, 5),
)
def test_the_way_down_ends_at_the_floor(units: int, size: int, block: int, least: float, frozen: int) -> None:
    group = _group(units, size, tuple(range(min(units, frozen))))
    grid = make_grid(group, block, least)
    counts = [units]
    while count := grid.below(counts[-1]):
        counts.append(count)
    assert counts == sorted(set(counts), reverse=True)
    assert all(
        count % grid.step == 0 and count >= max(1, math.floor(least * units), len(group.frozen)) for count in counts[1:]
    )


def test_frozen_units_stay_whatever_their_score() -> None:
    structure = Structure(mlp())
    name = structure.groups[0].name
    scores = {name: np.array([*range(64)], float)}
    assert best_units(structure, scores, {name: 3}) == {name: [61, 62, 63]}
    assert best_units(structure, {name: np.zeros(64)}, {name: 3}) == {name: [0, 1, 2]}


class _Table:
    """Milliseconds by formula: linear in the width of each group, except that the second half of the last group saves nothing."""

    def __init__(self, prices: dict[str, float]) -> None:
        self._prices = prices

    def totals(self, plans: list[dict[str, list[int]]]) -> list[float]:
        return [sum(price * len(plan.get(name, ())) for name, price in self._prices.items()) for plan in plans]


def test_greedy_reaches_the_goal_at_about_the_least_loss() -> None:
    structure = Structure(cnn())
    scores = {name: np.sort(score)[::-1] ** 2 for name, score in by_norm(structure).items()}
    names = [group.name for group in structure.groups if group.cuttable]
    grids = {name: Grid(4, 4, 4) for name in names}
    table = _Table(dict(zip(names, (1.0, 3.0), strict=True)))
    widest = dict.fromkeys(names, 32)
    counts, ms = fastest_for_least(structure, scores, table, widest, 80.0, grids)  # type: ignore[arg-type]
    assert ms == counts[names[0]] + 3 * counts[names[1]] <= 80.0

    def lost(pair: tuple[int, int]) -> float:
        return -sum(
            math.log(scores[name][:count].sum() / scores[name].sum()) for name, count in zip(names, pair, strict=True)
        )

    options = [pair for pair in itertools.product(range(4, 33, 4), repeat=2) if pair[0] + 3 * pair[1] <= 80]
    # Greedy overshoots by up to one step of the dearer group.
    assert lost((counts[names[0]], counts[names[1]])) <= lost(min(options, key=lost)) * 1.25


def test_a_goal_out_of_reach_ends_at_the_floors() -> None:
    structure = Structure(cnn())
    names = [group.name for group in structure.groups if group.cuttable]
    grids = {name: Grid(8, 8, 16) for name in names}
    table = _Table({names[0]: 1.0, names[1]: 0.0})
    counts, ms = fastest_for_least(structure, by_norm(structure), table, dict.fromkeys(names, 32), 1.0, grids)  # type: ignore[arg-type]
    assert (counts, ms) == ({names[0]: 16, names[1]: 32}, 16.0)  # what saves nothing is not cut


def test_uniform_takes_every_group_named() -> None:
    structure = Structure(cnn())
    grids = {group.name: make_grid(group, 8, 0.0) for group in structure.groups if group.cuttable}
    assert list(uniform(structure, grids, 0.5).values()) == [16, 16]
