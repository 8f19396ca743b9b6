"""The order in which groups should be returned from INT8 to float.

If two neighbouring groups round the same tensor, leaving one of them float recovers nothing, since the other group still rounds it.
Yet if either of them is the only integer group, it causes the whole loss. So a group's part in the loss is the mean of two
measurements: the loss if it is the only integer group (Δ), and the accuracy recovered if it is the only float group (Δ'). These are
the first and the last term of the group's Shapley value. If groups interact in pairs only, the mean equals the Shapley value, and the
parts add up to the whole loss. (L. Shapley, "A value for n-person games", 1953; M. Grabisch, "k-order additive discrete fuzzy
measures", 1997.) Errors can also mask one another. So the first places of the ranking are decided one at a time, with all groups
ranked higher in float.

Accuracy on a few hundred samples changes in steps, and most groups change it by at most one step. So the group with the largest part,
the leader, is compared with every other group, sample by sample. The leader and the groups that do not differ significantly from it
form a tier. Within a tier, groups are sorted by their part in the divergence from the original's outputs, which is continuous. The
remaining groups form further tiers in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from penstock.measurement import Interval
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.judge.judge import Judgement
from penstock.offline.judge.metrics import mean_interval
from penstock.tensor import Array

_CANDIDATES = 8
"""Number of groups that are measured again to decide one place of the ranking."""


class Rank(msgspec.Struct, frozen=True):
    """One group's part in the loss of a version of the model. All intervals are paired, sample by sample."""

    name: str
    part: Interval
    """The group's part in the loss of accuracy: the mean of Δ and Δ', or Δ' if Δ was not measured."""
    alone: Interval | None
    """Δ: accuracy lost with only this group integer. None if not measured, or if the group has no product to quantise."""
    recovered: Interval
    """Δ': accuracy recovered when this group becomes float in addition to the groups that already are."""
    divergence: Interval
    """The group's part in the divergence from the original's outputs."""
    by: Literal["accuracy", "divergence"]
    """The measure by which the group was sorted: accuracy if the group is alone in its tier, otherwise divergence."""
    expected: float
    """Estimated part in the loss: the tier's loss (at least half a sample), divided in proportion to ``divergence``."""
    most: float
    """The larger of the two divergences whose mean is ``divergence``: a bound on the group's effect when its neighbours are float."""


def rank_groups(trials: Trials, floats: Collection[str], names: Sequence[str], with_alone: bool = True) -> list[Rank]:
    """The groups ``names``, sorted by decreasing part in the loss of the version in which the groups ``floats`` are float."""
    base = frozenset(floats)
    parts = {name: _Part(trials, base, name, with_alone) for name in names}

    def is_behind(leader: str, name: str) -> bool:
        return trials.judge.reference.interval(parts[leader].scores - parts[name].scores).low > 0

    gains = {name: float(part.scores.mean()) for name, part in parts.items()}
    ranks: list[Rank] = []
    for tier in tiers(names, gains, is_behind):
        lost = max(sum(max(0.0, gains[name]) for name in tier), 0.5 / trials.judge.data.units)
        steps = {name: max(0.0, float(parts[name].divergence.mean())) for name in tier}
        whole = sum(steps.values())
        by: Literal["accuracy", "divergence"] = "accuracy" if len(tier) == 1 else "divergence"
        for name in sorted(tier, key=lambda name: -steps[name]):
            share = steps[name] / whole if whole > 0 else 1 / len(tier)
            ranks.append(parts[name].rank(by, lost * share))
    return ranks


def rank_again(trials: Trials, floats: Collection[str], ranks: Iterable[Rank], with_alone: bool = True) -> list[Rank]:
    """Measure again, with the groups ``floats`` in float, the eight groups of ``ranks`` whose effect may be largest."""
    likely = sorted(ranks, key=lambda rank: -rank.most)[:_CANDIDATES]
    return rank_groups(trials, floats, [rank.name for rank in likely], with_alone)


def first_ranked(trials: Trials, ranks: Sequence[Rank], count: int, with_alone: bool = True) -> list[Rank]:
    """``ranks`` with the first ``count`` places decided one after another.

    At these places, ``by`` and ``expected`` are measured with all higher-ranked groups in float. The other fields do not change.
    """
    rest = {rank.name: rank for rank in ranks}
    first: list[Rank] = []
    for _ in range(count):
        best = rank_again(trials, [rank.name for rank in first], rest.values(), with_alone)[0]
        first.append(msgspec.structs.replace(rest.pop(best.name), by=best.by, expected=best.expected))
    return [*first, *rest.values()]


def tiers(names: Sequence[str], gains: Mapping[str, float], is_behind: Callable[[str, str], bool]) -> list[list[str]]:
    """``names`` in tiers. A tier has the remaining group of largest gain, and all groups that are not significantly below it."""
    rest, found = list(names), []
    while rest:
        leader = max(rest, key=lambda name: gains[name])
        found.append([name for name in rest if name == leader or not is_behind(leader, name)])
        rest = [name for name in rest if name not in found[-1]]
    return found


class _Part:
    """A group's part in the loss, sample by sample."""

    def __init__(self, trials: Trials, base: frozenset[str], name: str, with_alone: bool) -> None:
        self._name, self._trials = name, trials
        self._last = _step(trials.outcome(base | {name}), trials.outcome(base))
        others = trials.mixed.others(name)
        has_first = with_alone and trials.mixed.is_integer(others)
        self._first = _step(trials.judge.baseline, trials.outcome(others)) if has_first else None
        known = [step for step in (self._first, self._last) if step is not None]
        self.scores: Array = np.mean([scores for scores, _ in known], axis=0)
        self.divergence: Array = np.mean([divergence for _, divergence in known], axis=0)

    def rank(self, by: Literal["accuracy", "divergence"], expected: float) -> Rank:
        interval = self._trials.judge.reference.interval
        return Rank(
            name=self._name,
            part=interval(self.scores),
            alone=None if self._first is None else interval(self._first[0]),
            recovered=interval(self._last[0]),
            divergence=mean_interval(self.divergence),
            by=by,
            expected=expected,
            most=max(float(step[1].mean()) for step in (self._first, self._last) if step is not None),
        )


def _step(better: Judgement, worse: Judgement) -> tuple[Array, Array]:
    """Accuracy lost, and divergence added, from one version to another."""
    return better.scores - worse.scores, worse.divergence - better.divergence
