"""Choose widths: either the same fraction for every group, or the widths that lose least for the milliseconds saved.

FLOPs do not predict time on a CPU: kernels work in blocks of 8 or 16 channels, so 45 of 64 channels are slower than 48, and a layer
may be memory-bound. Widths are therefore multiples of a block, and each layer is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from penstock.offline.compress.pruning.structured.coupling import ChannelGroup
from penstock.offline.compress.pruning.structured.cut import Kept, Structure
from penstock.offline.compress.pruning.structured.importance import Scores
from penstock.offline.compress.pruning.structured.latency import LatencyTable

_TINY = 1e-9
_FARTHEST = 3
"""A step of the search narrows a group by at most this many strides."""
_STEPS = 8
"""A group's width is divided into about this many strides."""

Counts = Mapping[str, int]
"""The number of units to keep, by group. In groups that are not listed, every unit is kept."""


class Grid(NamedTuple):
    """The possible widths of a group, in units: multiples of ``step``, starting at ``floor``."""

    step: int
    stride: int
    """The stride of the search, a multiple of ``step``."""
    floor: int

    def nearest(self, count: float) -> int:
        return max(self.floor, self.step * math.floor(count / self.step + 0.5))

    def below(self, count: int, strides: int = 1) -> int:
        """The width that is ``strides`` strides below ``count``; 0 if that is below ``floor``."""
        to = ((count - 1) // self.stride - strides + 1) * self.stride
        return to if to >= self.floor else 0


def make_grid(group: ChannelGroup, block: int, least: float) -> Grid:
    """The multiples of ``block`` channels that are at least ``least`` times the full width. Narrow groups have smaller steps."""
    step = block // math.gcd(block, group.unit_size)
    while step > 1 and 4 * step > group.units:
        step //= 2
    stride = max(step, group.units // _STEPS // step * step)
    fewest = max(1.0, least * group.units, len(group.frozen))
    return Grid(step, stride, min(group.units, step * math.ceil(fewest / step)))


def uniform(structure: Structure, grids: Mapping[str, Grid], width: float) -> dict[str, int]:
    """For each group, the fraction ``width`` of its units, rounded to a width on the group's grid."""
    units = {name: structure.group(name).units for name in grids}
    return {name: min(units[name], grid.nearest(units[name] * width)) for name, grid in grids.items()}


def best_units(structure: Structure, scores: Scores, counts: Counts) -> dict[str, list[int]]:
    """The units to keep: the frozen units, then the units of highest score. On a tie, earlier units are kept."""
    kept = {}
    for name, count in counts.items():
        rank = scores[name].copy()
        rank[list(structure.group(name).frozen)] = np.inf
        kept[name] = sorted(np.argsort(-rank, kind="stable")[:count].tolist())
    return kept


def fastest_for_least(
    structure: Structure,
    scores: Scores,
    table: LatencyTable,
    widest: Counts,
    goal_ms: float,
    grids: Mapping[str, Grid],
) -> tuple[dict[str, int], float]:
    """Search greedily, from ``widest`` down, for widths at which the layers take ``goal_ms`` in total. Also returns the time reached.

    Each step narrows the group with the least loss per millisecond saved. The loss is the negative logarithm of the fraction of the
    score that is kept, so each halving of a group costs the same. If narrowing by one stride saves no time in any group, several
    strides are tried. The search ends early if these save no time either.
    """
    counts = dict(widest)
    plan = best_units(structure, scores, counts)
    (now,) = table.totals([plan])
    strides = 1
    while now > goal_ms and strides <= _FARTHEST:
        before = _loss(scores, plan)
        trials = [{**counts, name: to} for name, grid in grids.items() if (to := grid.below(counts[name], strides))]
        plans = [best_units(structure, scores, trial) for trial in trials]
        options = [
            ((_loss(scores, plans[number]) - before) / (now - ms), number, ms)
            for number, ms in enumerate(table.totals(plans))
            if ms < now
        ]
        if options:
            _, number, now = min(options)
            counts, plan = trials[number], plans[number]
        strides = 1 if options else strides + 1
    return counts, now


def _loss(scores: Scores, plan: Kept) -> float:
    shares = (float(scores[name][list(numbers)].sum() / (scores[name].sum() or 1.0)) for name, numbers in plan.items())
    return -math.fsum(math.log(max(share, _TINY)) for share in shares)
