"""Probes of a forest: rows that reach its leaves, at the edges of the boxes that the thresholds cut.

The path to a leaf bounds each feature from both sides, so a leaf is a box of inputs. A row in a corner of the box touches all bounds
of the path at once, and a threshold that moves by one unit in the last place sends this row to another leaf.

1. Each leaf has a row in its upper corner and one in its lower corner.
2. Each comparison that a missing value can reach has a row with this missing value.
3. Each comparison with a set has a row for each category.
4. If there are more rows than allowed, some are drawn at random. Leaves that these rows do not reach come first in the next draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from penstock.offline.convert.tables.forest import Forest, Tree, rounded
from penstock.tensor import Array

_MOST_ROWS = 1 << 14
_BRIEF_ROWS = 1 << 10
_MOST_STEPS = 1 << 23
"""Largest number of rows times trees."""
_MOST_ELEMENTS = 1 << 24
_RANDOM_ROWS = 64
_DRAWS = 2
_SPREAD = 0.5
"""Distance of free values from the thresholds, in proportion to the range of the thresholds."""
Corner = Literal["upper", "lower", "missing"]


class Reach(NamedTuple):
    """Rows [N, features], and how many of the leaves they reach. Leaves with contradictory paths do not count."""

    rows: Array
    reached: int = 0
    leaves: int = 0
    touched: int = 0
    """Number of thresholds with a row directly below and one directly above."""
    thresholds: int = 0

    @property
    def note(self) -> str:
        """The numbers of leaves and thresholds without a row; empty if all leaves have one."""
        missed, untouched = self.leaves - self.reached, self.thresholds - self.touched
        if not missed:
            return ""
        return (
            f"{missed} of {self.leaves} leaves and {untouched} of {self.thresholds} thresholds of the trees were not reached in the "
            "comparison"
        )


class _Aim(NamedTuple):
    """One row: the node to reach, and the values of the bounded features."""

    tree: int
    node: int
    corner: Corner
    category: int | None = None


class _Box(NamedTuple):
    """The inputs that reach a node: bounds [low, high] of numbers, allowed categories, and features that may be NaN."""

    bounds: dict[int, tuple[float, float]]
    categories: dict[int, set[int]]
    missing: dict[int, bool]


def probes_of(
    forest: Forest,
    rng: np.random.Generator,
    dtype: type[np.floating] = np.float32,
    *,
    missing: bool = True,
    whole: bool = False,
    brief: bool = False,
) -> Reach:
    """Rows of ``dtype``. With ``missing``, some have NaN; with ``whole``, all numbers are whole; with ``brief``, there are few."""
    prober = _Prober(forest, rng, dtype, missing=missing, whole=whole)
    if brief:
        return Reach(np.concatenate([prober.random(_RANDOM_ROWS), prober.few(_BRIEF_ROWS)]))
    rows = np.concatenate([prober.random(_RANDOM_ROWS), *prober.batches(_MOST_ROWS)])
    return prober.reach(rows)


class _Prober:
    """Fills the rows. ``reached`` has the nodes of each tree that are leaves with a row."""

    def __init__(
        self, forest: Forest, rng: np.random.Generator, dtype: type[np.floating], *, missing: bool, whole: bool
    ) -> None:
        self._forest, self._rng, self._dtype, self._missing, self._whole = forest, rng, dtype, missing, whole
        self._thresholds = [_in(dtype, tree.threshold, forest.compare) for tree in forest.trees]
        self._edges = [self._sides(thresholds) for thresholds in self._thresholds]
        self._parents = [_parents(tree) for tree in forest.trees]
        self._low, self._high, self._known = self._ranges()
        self.reached = [np.zeros(len(tree.yes), np.bool_) for tree in forest.trees]
        self._touched = [np.zeros((2, len(tree.yes)), np.bool_) for tree in forest.trees]
        self._impossible: set[tuple[int, int]] = set()

    @property
    def leaves(self) -> int:
        """The number of leaves that are not known to be out of reach."""
        return sum(1 for node in self._nodes(leaves=True) if node not in self._impossible)

    def reach(self, rows: Array) -> Reach:
        """``rows``, with what the rows so far have reached."""
        inner = [tree.yes >= 0 for tree in self._forest.trees]
        for tree, some in zip(self._forest.trees, inner, strict=True):
            some[list(tree.sets)] = False
        touched = sum(int((one.all(axis=0) & some).sum()) for one, some in zip(self._touched, inner, strict=True))
        reached = sum(int(one.sum()) for one in self.reached)
        return Reach(rows, reached, self.leaves, touched, sum(int(some.sum()) for some in inner))

    def few(self, most: int) -> Array:
        """At most ``most`` rows, for nodes that are drawn at random."""
        trees = self._forest.trees
        ends = np.cumsum([len(tree.yes) for tree in trees])
        aims = []
        for place in self._rng.choice(ends[-1], min(most, ends[-1]), replace=False).tolist():
            number = int(np.searchsorted(ends, place, side="right"))
            tree, node = trees[number], place - int(ends[number]) + len(trees[number].yes)
            corner: Corner = "upper" if self._rng.random() < 0.5 else "lower"
            if node and self._parents[number][node] < 0:
                continue
            if tree.yes[node] < 0:
                aims.append(_Aim(number, node, corner))
            elif node in tree.sets:
                aims.append(_Aim(number, node, corner, int(self._rng.choice(self._known[int(tree.feature[node])]))))
            elif self._missing:
                aims.append(_Aim(number, node, "missing"))
        return self._rows(aims)

    def batches(self, most: int) -> Iterator[Array]:
        """At most ``most`` rows, in several draws."""
        left = min(
            most, _MOST_STEPS // max(1, len(self._forest.trees)), _MOST_ELEMENTS // max(1, self._forest.features)
        )
        corners = [_Aim(*leaf, corner) for leaf in self._nodes(leaves=True) for corner in ("upper", "lower")]
        others = [*self._of_categories(), *(self._of_missing() if self._missing else ())]
        if len(corners) + len(others) <= left:
            yield self._rows([*corners, *others])
            return
        yield self._rows(self._drawn(others, left // 4))
        share = (left - min(len(others), left // 4)) // _DRAWS
        for _ in range(_DRAWS):
            possible = [aim for aim in corners if (aim.tree, aim.node) not in self._impossible]
            first = self._drawn([aim for aim in possible if not self.reached[aim.tree][aim.node]], share)
            second = [aim for aim in possible if self.reached[aim.tree][aim.node]]
            yield self._rows([*first, *self._drawn(second, share - len(first))])

    def random(self, rows: int) -> Array:
        """Rows between the thresholds and around them."""
        found = self._rng.uniform(self._low, self._high, (rows, self._forest.features)).astype(self._dtype)
        for feature, known in self._known.items():
            found[:, feature] = self._rng.choice(known, rows)
        return np.rint(found) if self._whole else found

    def _rows(self, aims: list[_Aim]) -> Array:
        rows = self.random(len(aims))
        kept = [self._fill(row, aim) for row, aim in zip(rows, aims, strict=True)]
        self._impossible.update(
            (aim.tree, aim.node)
            for aim, filled in zip(aims, kept, strict=True)
            if not filled and aim.corner != "missing" and aim.category is None
        )
        rows = rows[np.array(kept, np.bool_)]
        for tree, reached in enumerate(self.reached):
            reached[self._leaves(tree, rows)] = True
        return rows

    def _fill(self, row: Array, aim: _Aim) -> bool:
        """Change ``row`` such that it reaches the node of ``aim``. False if no row does."""
        box, tree = self._box(aim), self._forest.trees[aim.tree]
        target = int(tree.feature[aim.node]) if tree.yes[aim.node] >= 0 else -1
        for feature, categories in box.categories.items():
            if not categories:
                return False
            row[feature] = self._rng.choice(sorted(categories))
        for feature, (low, high) in box.bounds.items():
            value = self._value(feature, low, high, aim.corner)
            if value is None and not (self._missing and box.missing[feature]):
                return False
            row[feature] = np.nan if value is None else value
        if aim.corner == "missing":
            if not box.missing.get(target, True):
                return False
            row[target] = np.nan
        if aim.category is not None:
            row[target] = aim.category
            return aim.category in box.categories.get(target, {aim.category})
        return True

    def _value(self, feature: int, low: float, high: float, corner: Corner) -> float | None:
        """A number from ``low`` to ``high``: at a bound, or plausible if there is no bound at this corner. None if there is none."""
        if self._whole:
            low, high = np.ceil(low), np.floor(high)
        if low > high or low == np.inf or high == -np.inf:
            return None
        width = self._high[feature] - self._low[feature]
        free = self._rng.uniform(0, width)
        if corner == "lower":
            value = low if np.isfinite(low) else min(high, high - free)
        else:
            value = high if np.isfinite(high) else max(low, low + free)
        window = self._forest.missing
        if window is not None and feature in self._forest.missing_in and window[0] <= value <= window[1]:
            outside = [
                float(self._next(np.array(edge), side)) for edge, side in zip(window, (-np.inf, np.inf), strict=True)
            ]
            return next((one for one in outside if low <= one <= high), None)
        return float(np.rint(value)) if self._whole else value

    def _box(self, aim: _Aim) -> _Box:
        tree, box = self._forest.trees[aim.tree], _Box({}, {}, {})
        parents, (lower, upper) = self._parents[aim.tree], self._edges[aim.tree]
        child = aim.node
        while child:
            node = int(parents[child])
            feature, holds = int(tree.feature[node]), bool(tree.yes[node] == child)
            box.missing[feature] = box.missing.get(feature, True) and bool(tree.missing_yes[node]) == holds
            if node in tree.sets:
                members = set(map(int, tree.sets[node]))
                allowed = box.categories.get(feature) or set(map(int, self._known[feature]))
                box.categories[feature] = allowed & members if holds else allowed - members
            else:
                low, high = box.bounds.get(feature, (-np.inf, np.inf))
                below, above = float(lower[node]), float(upper[node])
                goes_below = holds != (self._forest.compare == ">")
                box.bounds[feature] = (low, min(high, below)) if goes_below else (max(low, above), high)
            child = node
        return box

    def _sides(self, threshold: Array) -> tuple[Array, Array]:
        """The largest numbers below the cuts at ``threshold``, and the smallest above them."""
        if self._forest.compare == "<":
            return self._next(threshold, -np.inf), threshold
        return threshold, self._next(threshold, np.inf)

    def _next(self, value: Array, towards: float) -> Array:
        with np.errstate(over="ignore", under="ignore"):
            return np.nextafter(value.astype(self._dtype), self._dtype(towards)).astype(np.float64)

    def _leaves(self, number: int, rows: Array) -> Array:
        """The leaf of each of ``rows``."""
        tree, thresholds, edges = self._forest.trees[number], self._thresholds[number], self._edges[number]
        if self._forest.missing is not None:
            low, high = self._forest.missing
            inside = (rows >= low) & (rows <= high) & np.isin(np.arange(self._forest.features), self._forest.missing_in)
            rows = np.where(inside, np.nan, rows)
        at, places = np.zeros(len(rows), np.int64), np.arange(len(rows))
        while (inner := tree.yes[at] >= 0).any():
            values, cuts = rows[places, np.where(inner, tree.feature[at], 0)], thresholds[at]
            for touched, edge in zip(self._touched[number], edges, strict=True):
                touched[at[inner & (values == edge[at])]] = True
            holds = {"<=": np.less_equal, "<": np.less, ">": np.greater}[self._forest.compare](values, cuts)
            for node, members in tree.sets.items():
                here = at == node
                holds[here] = np.isin(np.trunc(values[here]), members)
            holds = np.where(np.isnan(values), tree.missing_yes[at], holds)
            at = np.where(inner, np.where(holds, tree.yes[at], tree.no[at]), at)
        return at

    def _ranges(self) -> tuple[Array, Array, dict[int, Array]]:
        """The range of free values of each feature, and the categories with one that is in no set."""
        low, high = (np.full(self._forest.features, sign * np.inf) for sign in (1, -1))
        known: dict[int, set[int]] = {}
        for tree, thresholds in zip(self._forest.trees, self._thresholds, strict=True):
            by_set = np.isin(np.arange(len(tree.yes)), list(tree.sets))
            for node, members in tree.sets.items():
                known.setdefault(int(tree.feature[node]), set()).update(map(int, members))
            used = (tree.yes >= 0) & ~by_set & (np.abs(thresholds) < np.finfo(np.float32).max / 4)
            np.minimum.at(low, tree.feature[used], thresholds[used])
            np.maximum.at(high, tree.feature[used], thresholds[used])
        free = low > high
        low[free], high[free] = -1.0, 1.0
        margin = _SPREAD * (high - low) + np.where(high == low, np.maximum(1.0, np.abs(low)), 0.0)
        lists = {feature: np.array([*sorted(each), max(each, default=0) + 1]) for feature, each in known.items()}
        return low - margin, high + margin, lists

    def _nodes(self, *, leaves: bool) -> Iterator[tuple[int, int]]:
        for number, tree in enumerate(self._forest.trees):
            for node in np.nonzero((tree.yes < 0) == leaves)[0].tolist():
                if node == 0 or self._parents[number][node] >= 0:
                    yield number, node

    def _of_missing(self) -> Iterator[_Aim]:
        return (_Aim(*node, "missing") for node in self._nodes(leaves=False))

    def _of_categories(self) -> Iterator[_Aim]:
        for number, tree in enumerate(self._forest.trees):
            for node in tree.sets:
                for category in self._known[int(tree.feature[node])].tolist():
                    yield _Aim(number, node, "upper", category)

    def _drawn(self, aims: list[_Aim], count: int) -> list[_Aim]:
        if len(aims) <= count:
            return aims
        return [aims[place] for place in self._rng.choice(len(aims), max(0, count), replace=False)]


def _in(dtype: type[np.floating], thresholds: Array, compare: str) -> Array:
    return rounded(thresholds, compare) if dtype is np.float32 else np.asarray(thresholds, np.float64)


def _parents(tree: Tree) -> Array:
    """The parent of each node; -1 for the root, and for nodes that nothing leads to."""
    found = np.full(len(tree.yes), -1)
    inner = np.nonzero(tree.yes >= 0)[0]
    found[tree.yes[inner]], found[tree.no[inner]] = inner, inner
    return found
