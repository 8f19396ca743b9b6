"""Mixed precision: find the fewest groups of operators that must stay float so that an INT8 model meets its contract.

Groups that save no time in INT8 become float first. The other groups are sorted by the accuracy that float gains per millisecond lost.
Bisection, with log2(n) runs, finds how many groups at the front of this order must be float. Bisection assumes that a version never
becomes worse when more groups are float. If measurements contradict this assumption, or if many groups would have to be float, a
second search turns groups to float one at a time. It ranks the remaining groups again every few steps. At the end, unnecessary groups
become integer again. Every decision is based on a measured version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy
from penstock.offline.compress.precision.ranking import Rank, rank_again
from penstock.offline.compress.precision.sensitivity import SensitivityReport, score
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.judge.contract import Contract


class MixedOptions(msgspec.Struct, frozen=True):
    """Limits of the search."""

    max_versions: int = 100
    """Maximum number of versions to run, in addition to those of the sensitivity report. The result is the best of all versions."""
    refresh: int = 4
    """The second search ranks the remaining groups again after turning this number of groups to float. That search runs if bisection
    would turn more groups than this number to float, or if measurements contradict the assumption of bisection."""


Precision = Literal["float", "integer"]


class Decision(msgspec.Struct, frozen=True):
    """One step of the search."""

    precision: Precision
    groups: tuple[str, ...]
    """The groups that changed to ``precision``."""
    reason: str
    loss: float
    """Accuracy lost against the original after this decision."""


class MixedResult(msgspec.Struct, frozen=True):
    """A model within the contract's accuracy, and the decisions that led to it."""

    artifact: Artifact
    """The original if every group had to stay float."""
    float_groups: tuple[str, ...]
    float_nodes: tuple[str, ...]
    """Names of the float nodes in a ``FloatModel``, for ``quantize(keep_float=...)``."""
    accuracy: Accuracy
    trail: tuple[Decision, ...]
    versions: int
    """Number of versions run in addition to the versions of the report."""


def choose(
    trials: Trials, report: SensitivityReport, contract: Contract, options: MixedOptions | None = None
) -> MixedResult:
    """Search as the module describes. A model with all groups float always meets the contract. The search is deterministic."""
    return _Search(trials, report, contract, options or MixedOptions()).run()


class Recovery(msgspec.Struct, frozen=True):
    """The effect of making the first groups of a report float: recovered accuracy and divergence, as fractions of the loss in INT8."""

    groups: int
    accuracy: float | None
    """None if INT8 loses no accuracy."""
    divergence: float | None


def recovery(trials: Trials, report: SensitivityReport, share: float = 0.1) -> Recovery:
    """The recovery if the first groups become float. Their number is ``share`` of all groups, rounded up."""
    count = math.ceil(share * len(report.groups))
    found = trials.outcome([one.group.name for one in report.groups[:count]])
    lost = report.int8.loss.value
    return Recovery(
        groups=count,
        accuracy=1 - found.accuracy.loss.value / lost if lost > 0 else None,
        divergence=1 - float(found.divergence.mean()) / report.divergence if report.divergence > 0 else None,
    )


class _Way(msgspec.Struct, frozen=True):
    """A set of groups that stay float, and the decisions that led to it."""

    floats: frozenset[str]
    trail: tuple[Decision, ...] = ()


class _Search:
    def __init__(self, trials: Trials, report: SensitivityReport, contract: Contract, options: MixedOptions) -> None:
        self._trials, self._contract, self._options = trials, contract, options
        self._savings = {one.group.name: one.saving_ms for one in report.groups}
        self._ranks = {one.group.name: one.rank for one in report.groups}
        self._unpaying = report.unpaying
        self._with_alone = any(rank.alone for rank in self._ranks.values())
        self._before = trials.count

    def run(self) -> MixedResult:
        """Run both searches of the module docstring, and return the result that loses the least time."""
        start = _Way(frozenset())
        if self._unpaying:
            start = self._step(start, "float", self._unpaying, "their integers save no time")
        if self._keeps(start.floats):
            return self._result(start)
        way, is_plausible = self._bisect(start)
        ways = [way]
        if not is_plausible:
            ways += self._one_by_one(start)
        return self._result(min(map(self._trim, ways), key=self._given_up))

    def _bisect(self, start: _Way) -> tuple[_Way, bool]:
        """The version with the fewest groups from the front that meets the contract. Also returns True if these groups are few and no
        version with more float groups was provably worse.
        """
        rest = self._sorted([rank for name, rank in self._ranks.items() if name not in start.floats])
        fails, keeps = 0, len(rest)
        tried = {fails, keeps}
        while keeps - fails > 1 and self._may_run:
            middle = (fails + keeps) // 2
            tried.add(middle)
            if self._keeps(start.floats | set(rest[:middle])):
                keeps = middle
            else:
                fails = middle
        prefixes = [start.floats | set(rest[:count]) for count in sorted(tried)]
        is_monotone = all(self._trials.gain(few, more).high >= 0 for few, more in pairwise(prefixes))
        way = self._step(start, "float", rest[:keeps], "the fewest groups, in order of accuracy per millisecond")
        return way, is_monotone and keeps <= self._options.refresh

    def _one_by_one(self, way: _Way) -> list[_Way]:
        """Turn groups to float one at a time until the contract is met. Returns no way if that takes too many versions."""
        rest = {name: rank for name, rank in self._ranks.items() if name not in way.floats}
        queue: list[str] = []
        while not self._keeps(way.floats):
            if not self._may_run:
                return []
            if not queue:
                ranks = rank_again(self._trials, way.floats, rest.values(), self._with_alone)
                queue = self._sorted(ranks)[: self._options.refresh]
            del rest[queue[0]]
            way = self._step(way, "float", [queue.pop(0)], "most accuracy per millisecond among the remaining groups")
        return [way]

    def _trim(self, way: _Way) -> _Way:
        """Make float groups integer again if the contract is met without them, starting with the groups of least effect."""
        added = sorted(way.floats - set(self._unpaying), key=lambda name: (self._ranks[name].expected, name))
        for name in added:
            if self._may_run and self._keeps(way.floats - {name}):
                way = self._step(way, "integer", [name], "the contract is met without the group")
        return way

    def _step(self, way: _Way, precision: Precision, groups: Sequence[str], reason: str) -> _Way:
        floats = way.floats | set(groups) if precision == "float" else way.floats - set(groups)
        loss = self._trials.outcome(floats).accuracy.loss.value
        return _Way(floats, (*way.trail, Decision(precision, tuple(groups), reason, loss)))

    def _result(self, way: _Way) -> MixedResult:
        mixed, accuracy = self._trials.mixed, self._trials.outcome(way.floats).accuracy
        names = tuple(group.name for group in mixed.groups if group.name in way.floats)
        artifact = mixed.with_float(names)
        if artifact is not mixed.artifact:
            options = {"contract": msgspec.to_builtins(self._contract), "float_groups": list(names)}
            facts = {"accuracy": msgspec.to_builtins(accuracy), "trail": msgspec.to_builtins(way.trail)}
            artifact = artifact.derive(artifact, "mixed_precision", options, facts)
        versions = self._trials.count - self._before
        return MixedResult(artifact, names, tuple(mixed.nodes(names)), accuracy, way.trail, versions)

    def _sorted(self, ranks: Sequence[Rank]) -> list[str]:
        """Sorted by accuracy per millisecond; groups without a measured saving come last, in order of rank."""
        timed = [rank for rank in ranks if self._savings[rank.name]]
        timed.sort(key=lambda rank: -score(rank, self._savings[rank.name]))
        return [rank.name for rank in (*timed, *(rank for rank in ranks if not self._savings[rank.name]))]

    def _given_up(self, way: _Way) -> tuple[float, int, int]:
        """The sort key of a search: the milliseconds lost, then the numbers of groups and steps. If results are equal, the shorter
        search wins.
        """
        savings = [saving for name in way.floats if (saving := self._savings[name])]
        # Addition of floats depends on the order, which a set does not fix.
        return math.fsum(max(0.0, saving.value) for saving in savings), len(way.floats), len(way.trail)

    def _keeps(self, floats: frozenset[str]) -> bool:
        if not self._trials.mixed.is_integer(floats):
            return True
        return not self._contract.accuracy_objection(self._trials.outcome(floats).accuracy)

    @property
    def _may_run(self) -> bool:
        return self._trials.count - self._before < self._options.max_versions
