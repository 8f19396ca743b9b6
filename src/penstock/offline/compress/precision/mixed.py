"""Mixed precision: the groups that stay float so that an INT8 model keeps its contract, and no more than these.

First go the groups whose integers save no time. The rest are put in order of accuracy won per millisecond given up, and bisection
finds how many of the first must be float: log2(n) versions. It takes for granted that more float groups are never worse; where
what it measured says otherwise, groups are added one by one instead, and ranked anew every few steps. What has been added and turns
out not to be needed becomes integer again. Every decision rests on a version that was run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy
from penstock.offline.compress.precision.ranking import Rank, rank_groups
from penstock.offline.compress.precision.sensitivity import SensitivityReport, score
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.tune.contract import Contract
from penstock.perf.chart import Scale, line_chart


class MixedOptions(msgspec.Struct, frozen=True):
    """How long to search."""

    max_versions: int = 100
    """Versions that may be run beyond those that the sensitivity report has run; what was found until then is the result."""
    refresh: int = 4
    """Steps of the one-by-one search after which what is left is ranked anew."""
    width: int = 8
    """How many of the best are ranked anew."""


class Decision(msgspec.Struct, frozen=True):
    """One step of the search."""

    precision: Literal["float", "integer"]
    groups: tuple[str, ...]
    """What became that."""
    reason: str
    loss: float
    """Accuracy lost against the original after this step."""


class MixedResult(msgspec.Struct, frozen=True):
    """A model that keeps the contract's accuracy, and how it came about."""

    artifact: Artifact
    """The original itself where every group had to stay float."""
    float_groups: tuple[str, ...]
    float_nodes: tuple[str, ...]
    """By their names in a ``FloatModel``, for ``quantize(keep_float=...)``."""
    accuracy: Accuracy
    trail: tuple[Decision, ...]
    versions: int
    """Versions run for it beyond the report's."""


def choose(
    trials: Trials, report: SensitivityReport, contract: Contract, options: MixedOptions | None = None
) -> MixedResult:
    """Search as above. The same report, data and options give the same result; all groups float always keep the contract."""
    search = _Search(trials, report, contract, options or MixedOptions())
    floats = search.run()
    return search.result(floats)


def refloat(trials: Trials, report: SensitivityReport, counts: Sequence[int]) -> list[tuple[int, Accuracy]]:
    """The accuracy with the first of ``report`` float, for each of ``counts``."""
    names = [one.group.name for one in report.groups]
    return [(count, trials.outcome(names[:count]).accuracy) for count in counts]


def recovered_share(trials: Trials, report: SensitivityReport, share: float = 0.1) -> float | None:
    """Of the accuracy that INT8 loses, what the first ``share`` of the groups win back when float, at least one group; None where
    INT8 loses nothing.
    """
    ((_, accuracy),) = refloat(trials, report, [math.ceil(share * len(report.groups))])
    lost = report.int8.loss.value
    return 1 - accuracy.loss.value / lost if lost > 0 else None


def refloat_chart(curve: Sequence[tuple[int, Accuracy]], original: Accuracy, contract: Contract) -> str:
    """SVG: accuracy against the number of groups left float, and the least that the contract allows."""
    series = {"first by rank": [(float(count), accuracy.value) for count, accuracy in curve]}
    return line_chart(
        series,
        "Accuracy by groups left float",
        Scale("groups left float"),
        Scale(original.metric, "{:.1%}"),
        [("original", original.value), ("least allowed", original.value - contract.max_accuracy_loss)],
    )


class _Search:
    def __init__(self, trials: Trials, report: SensitivityReport, contract: Contract, options: MixedOptions) -> None:
        self._trials, self._contract, self._options = trials, contract, options
        self._unpaying = report.unpaying
        self._savings = {one.group.name: one.saving_ms for one in report.groups}
        self._expected = {one.group.name: one.rank.expected for one in report.groups}
        self._order = self._sorted([one.rank for one in report.groups if one.group.name not in report.unpaying])
        self._with_alone = any(one.rank.alone for one in report.groups)
        self._before = trials.count
        self._trail: list[Decision] = []

    def run(self) -> frozenset[str]:
        """The groups to leave float."""
        base = frozenset(self._unpaying)
        if base:
            self._note("float", self._unpaying, "their integers save no time", base)
        if self._keeps(base):
            return base
        count, is_monotone = self._bisect(base)
        floats = base | set(self._order[:count])
        if is_monotone:
            self._note(
                "float",
                self._order[:count],
                "by bisection, the fewest of the first by accuracy per millisecond",
                floats,
            )
        else:
            floats = self._greedy(base) or floats
        return self._trim(floats)

    def result(self, floats: frozenset[str]) -> MixedResult:
        mixed, accuracy = self._trials.mixed, self._trials.outcome(floats).accuracy
        names = tuple(group.name for group in mixed.groups if group.name in floats)
        nodes = tuple(mixed.nodes(floats))
        artifact, versions = mixed.with_float(floats), self._trials.count - self._before
        if artifact is not mixed.artifact:
            options = {"contract": msgspec.to_builtins(self._contract), "float_groups": list(names)}
            facts = {"accuracy": msgspec.to_builtins(accuracy), "trail": msgspec.to_builtins(self._trail)}
            artifact = artifact.derive(artifact.data, "mixed_precision", options, facts)
        return MixedResult(artifact, names, nodes, accuracy, tuple(self._trail), versions)

    def _bisect(self, base: frozenset[str]) -> tuple[int, bool]:
        """The smallest number of groups of the order that keeps the contract, and whether more were never provably worse."""
        fails, keeps = 0, len(self._order)
        tried = {fails, keeps}
        while keeps - fails > 1 and self._may_run:
            middle = (fails + keeps) // 2
            tried.add(middle)
            if self._keeps(base | set(self._order[:middle])):
                keeps = middle
            else:
                fails = middle
        prefixes = [base | set(self._order[:count]) for count in sorted(tried)]
        return keeps, all(self._trials.gain(few, more).high >= 0 for few, more in pairwise(prefixes))

    def _greedy(self, base: frozenset[str]) -> frozenset[str] | None:
        """Groups added one by one until the contract is kept; None if there were too many versions to run."""
        floats, rest = base, list(self._order)
        while not self._keeps(floats):
            if not self._may_run:
                return None
            steps = len(floats) - len(base)
            if steps and steps % self._options.refresh == 0:
                best, others = rest[: self._options.width], rest[self._options.width :]
                rest = self._sorted(rank_groups(self._trials, floats, best, self._with_alone)) + others
            floats |= {rest[0]}
            self._note("float", rest[:1], "most accuracy per millisecond of those left", floats)
            del rest[0]
        return floats

    def _trim(self, floats: frozenset[str]) -> frozenset[str]:
        """Without the groups that the contract does not need, those of least effect first."""
        for name in sorted(floats - set(self._unpaying), key=lambda name: (self._expected[name], name)):
            if self._may_run and self._keeps(floats - {name}):
                floats -= {name}
                self._note("integer", [name], "the contract is kept without it", floats)
        return floats

    def _sorted(self, ranks: Sequence[Rank]) -> list[str]:
        """By accuracy per millisecond; those whose saving was not measured come last, as they are ranked."""
        timed = [rank for rank in ranks if self._savings[rank.name]]
        timed.sort(key=lambda rank: -score(rank, self._savings[rank.name]))
        return [rank.name for rank in (*timed, *(rank for rank in ranks if not self._savings[rank.name]))]

    def _keeps(self, floats: frozenset[str]) -> bool:
        if not self._trials.mixed.is_integer(floats):
            return True
        return not self._contract.accuracy_objection(self._trials.outcome(floats).accuracy)

    @property
    def _may_run(self) -> bool:
        return self._trials.count - self._before < self._options.max_versions

    def _note(
        self, precision: Literal["float", "integer"], groups: Sequence[str], reason: str, floats: frozenset[str]
    ) -> None:
        loss = self._trials.outcome(floats).accuracy.loss.value
        self._trail.append(Decision(precision, tuple(groups), reason, loss))
