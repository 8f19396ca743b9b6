"""Probes of forests: every leaf that can be reached has a row, at the edges of its box."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.offline.convert.tables import probes
from penstock.offline.convert.tables.forest import Forest, Tree
from penstock.offline.convert.tables.probes import probes_of
from penstock.tensor import Array


def deep(depth: int, rng: np.random.Generator, features: int = 3, **sets: object) -> Tree:
    """A complete tree with random thresholds, some of which contradict each other."""
    inner = 2**depth - 1
    count = 2 * inner + 1
    at = np.arange(count)
    is_inner = at < inner
    return Tree(
        np.where(is_inner, rng.integers(0, features, count), -1),
        np.where(is_inner, rng.normal(size=count), 0.0),
        np.where(is_inner, 2 * at + 1, -1),
        np.where(is_inner, 2 * at + 2, -1),
        is_inner & (rng.random(count) < 0.5),
        rng.normal(size=(count, 1)),
    )


def stump(threshold: float, members: tuple[int, ...] | None = None) -> Tree:
    children = np.array([1, -1, -1]), np.array([2, -1, -1])
    values = np.array([[0.0], [1.0], [2.0]])
    sets = {} if members is None else {0: members}
    return Tree(np.array([0, -1, -1]), np.array([threshold, 0, 0]), *children, np.zeros(3, bool), values, 0, sets)


def leaves(forest: Forest, tree: Tree, x: Array) -> set[int]:
    """The leaves of the rows ``x``, one row after the other."""
    holds = {"<=": np.less_equal, "<": np.less, ">": np.greater}[forest.compare]
    found = set()
    for row in x:
        at = 0
        while tree.yes[at] >= 0:
            value = row[tree.feature[at]]
            goes = tree.missing_yes[at] if np.isnan(value) else holds(np.float64(value), tree.threshold[at])
            at = tree.yes[at] if goes else tree.no[at]
        found.add(int(at))
    return found


@pytest.mark.parametrize("compare", ["<=", "<", ">"])
@pytest.mark.parametrize("seed", range(4))
def test_all_leaves_that_random_rows_reach_have_a_row(compare: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    forest = Forest([deep(5, rng), deep(4, rng)], compare, np.zeros(1), 3)
    found = probes_of(forest, rng)
    dense = rng.normal(size=(4000, 3)).astype(np.float32)
    dense[rng.random(dense.shape) < 0.1] = np.nan
    reached = [leaves(forest, tree, found.rows) for tree in forest.trees]
    assert found.reached == found.leaves == sum(map(len, reached))
    for tree, each in zip(forest.trees, reached, strict=True):
        assert leaves(forest, tree, dense) <= each
    assert not found.note


@pytest.mark.parametrize("compare", ["<=", "<", ">"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_threshold_is_touched_from_both_sides(compare: str, dtype: type[np.floating]) -> None:
    threshold = dtype(0.25)
    rows = set(
        probes_of(
            Forest([stump(float(threshold))], compare, np.zeros(1), 1), np.random.default_rng(0), dtype
        ).rows.ravel()
    )
    beside = np.nextafter(threshold, dtype(-1 if compare == "<" else 1))
    assert {threshold, beside} <= rows


def test_every_comparison_sees_a_missing_value_only_if_allowed() -> None:
    forest = Forest([stump(0.5)], "<=", np.zeros(1), 1)
    assert np.isnan(probes_of(forest, np.random.default_rng(0)).rows).any()
    assert not np.isnan(probes_of(forest, np.random.default_rng(0), missing=False).rows).any()


def test_every_category_and_an_unknown_one_have_a_row() -> None:
    forest = Forest([stump(0, (2, 5, 7))], "<=", np.zeros(1), 1, categorical=[0])
    found = probes_of(forest, np.random.default_rng(0))
    assert {2.0, 5.0, 7.0, 8.0} <= set(found.rows.ravel().tolist())
    assert (found.reached, found.leaves) == (2, 2)


def test_whole_numbers_lie_beside_the_threshold() -> None:
    rows = probes_of(
        Forest([stump(2.5)], "<=", np.zeros(1), 1), np.random.default_rng(0), whole=True, missing=False
    ).rows
    assert {2.0, 3.0} <= set(rows.ravel().tolist())
    assert (rows == np.rint(rows)).all()


def test_values_that_count_as_missing_are_avoided() -> None:
    forest = Forest([stump(0.0)], "<=", np.zeros(1), 1, missing=(0.0, 0.0), missing_in=[0])
    found = probes_of(forest, np.random.default_rng(0))
    assert (found.reached, found.leaves) == (2, 2)


def test_leaves_without_a_row_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_MOST_ROWS", 8)
    rng = np.random.default_rng(0)
    found = probes_of(Forest([deep(8, rng, features=30)], "<=", np.zeros(1), 30), rng)
    assert len(found.rows) <= 8 + 64
    missed, untouched = found.leaves - found.reached, found.thresholds - found.touched
    told = f"{missed} of {found.leaves} leaves and {untouched} of {found.thresholds} thresholds of the trees"
    assert found.note == f"{told} were not reached in the comparison"
    assert 0 < untouched < found.thresholds == 255
    assert found.reached < found.leaves


def test_brief_probes_are_few_and_claim_nothing() -> None:
    rng = np.random.default_rng(0)
    forest = Forest([deep(10, rng, features=30) for _ in range(4)], "<=", np.zeros(1), 30)
    found = probes_of(forest, rng, brief=True)
    assert 100 < len(found.rows) <= 1024 + 64
    assert not found.note
