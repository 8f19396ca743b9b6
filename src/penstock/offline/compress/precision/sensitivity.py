"""Measure the accuracy that each group of operators loses in INT8, and the time that it saves.

For a group g, Δ is the loss with only g integer, and Δ' is the accuracy recovered with only g float. ``ranking.py`` sorts groups by
both. τ = latency(all but g integer) - latency(all integer) is the time that g saves in INT8. Conversions at a group's borders prevent
fusions, so τ must be measured, and it is often negative.
"""

from __future__ import annotations

import math

import msgspec

from penstock.bundle.evidence import Accuracy
from penstock.errors import InvalidConfig
from penstock.measurement import Interval
from penstock.offline.compress.precision.groups import OperatorGroup
from penstock.offline.compress.precision.ranking import Rank, first_ranked, rank_groups
from penstock.offline.compress.precision.savings import Savings, measure_savings
from penstock.offline.compress.precision.sqnr import TensorNoise, activation_noise, noisiest, weight_noise
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.sessions import call_rows
from penstock.perf.chart import Scale, bar_chart


class SensitivityOptions(msgspec.Struct, frozen=True):
    """Options of the measurements."""

    alone: bool = True
    """Also measure Δ of every group, which doubles the number of versions."""
    refined: float = 0.1
    """Fraction of the groups, rounded up, whose places are decided one at a time. Each such place requires eight more versions."""
    rows: int = 1
    """Samples in a timed call, if the model's batch size is free."""
    budget_s: float = 20.0
    """Time limit in seconds for measuring latencies. If it is too short, groups of little effect are not timed. 0 disables timing."""
    memory_bytes: int = 1 << 30
    """Memory limit, by the engine's estimate, for the versions that are timed together. At least two versions are loaded."""

    def __post_init__(self) -> None:
        if self.rows < 1 or not 0 <= self.budget_s < math.inf or not 0 <= self.refined <= 1:
            raise InvalidConfig(
                f"invalid sensitivity options: rows={self.rows}, budget_s={self.budget_s}, refined={self.refined}",
                "give at least 1 row, a finite budget of 0 or more seconds, and a fraction refined between 0 and 1",
            )


class GroupSensitivity(msgspec.Struct, frozen=True):
    """The sensitivity of one group."""

    group: OperatorGroup
    rank: Rank
    """The group's place in the ranking, with Δ and Δ'."""
    saving_ms: Interval | None
    """τ: milliseconds that the group saves in INT8 in one call; None if not measured."""
    activation: TensorNoise | None
    """The group's calibrated activation with the lowest SQNR."""
    weight: TensorNoise | None
    """The group's weight with the lowest SQNR."""


class SensitivityReport(msgspec.Struct, frozen=True):
    """All groups, sorted by their loss of accuracy, largest first."""

    metric: str
    proxy: str
    """Name of the measure in ``Rank.divergence``."""
    samples: int
    original: Accuracy
    int8: Accuracy
    divergence: float
    """Divergence of the INT8 model from the original, mean over samples."""
    threads: int
    rows: int
    int8_ms: float | None
    """Median latency of one call; None if nothing was timed."""
    groups: tuple[GroupSensitivity, ...]
    unpaying: tuple[str, ...]
    """See ``Savings.unpaying``."""

    @property
    def untimed(self) -> tuple[str, ...]:
        """Names of the groups without a measured saving."""
        return tuple(one.group.name for one in self.groups if one.saving_ms is None)


def measure_sensitivity(
    trials: Trials, options: SensitivityOptions | None = None, on_progress: Progress = no_progress
) -> SensitivityReport:
    """Measure every group of ``trials``. Raises the errors of loading and running a version.

    Without latencies, the report is deterministic. Memory: the versions that are timed together, and a few bytes for each sample and
    version.
    """
    options = options or SensitivityOptions()
    _run(trials, options.alone, on_progress)
    ranks = rank_groups(trials, (), [group.name for group in trials.mixed.groups], options.alone)
    ranks = first_ranked(trials, ranks, math.ceil(options.refined * len(ranks)), options.alone)
    rows = call_rows(trials.judge.signature, options.rows)
    savings = Savings(None, {}, ())
    if options.budget_s > 0:
        savings = measure_savings(trials, [rank.name for rank in ranks], rows, options.budget_s, options.memory_bytes)
    int8 = trials.outcome()
    return SensitivityReport(
        metric=trials.judge.metric,
        proxy=trials.judge.reference.proxy,
        samples=trials.judge.data.units,
        original=trials.judge.baseline.accuracy,
        int8=int8.accuracy,
        divergence=float(int8.divergence.mean()),
        threads=trials.judge.threads,
        rows=rows,
        int8_ms=savings.int8_ms,
        groups=_sensitivities(trials, ranks, savings),
        unpaying=savings.unpaying,
    )


def score(rank: Rank, saving_ms: Interval | None) -> float:
    """Expected gain of accuracy per millisecond lost, if the group becomes float.

    A saving below half the width of its interval, or below 1 µs, is raised to that value. An unmeasured saving counts as 1 ms.
    """
    if saving_ms is None:
        return rank.expected
    return rank.expected / max(saving_ms.value, (saving_ms.high - saving_ms.low) / 2, 1e-3)


def sensitivity_chart(report: SensitivityReport) -> str:
    """SVG chart of each group's part in the loss, part in the divergence, and τ, in order of rank."""
    rows = [
        (
            one.group.name,
            one.rank.part.value,
            one.rank.divergence.value,
            one.saving_ms.value if one.saving_ms else float("nan"),
        )
        for one in report.groups
    ]
    return bar_chart(
        rows,
        "Accuracy lost and time saved by each group",
        Scale(f"part in the {report.metric} lost", "{:.1%}"),
        Scale(f"part in the {report.proxy}", "{:.2g}"),
        Scale("ms saved by integers", "{:.2g}"),
    )


def _run(trials: Trials, with_alone: bool, on_progress: Progress) -> None:
    """Run every version that the ranking needs."""
    mixed = trials.mixed
    versions = [{group.name} for group in mixed.groups]
    if with_alone:
        versions += [others for group in mixed.groups if mixed.is_integer(others := set(mixed.others(group.name)))]
    for done, floats in enumerate(versions, 1):
        trials.outcome(floats)
        on_progress(done, len(versions))


def _sensitivities(trials: Trials, ranks: list[Rank], savings: Savings) -> tuple[GroupSensitivity, ...]:
    mixed = trials.mixed
    groups = {group.name: group for group in mixed.groups}
    noise = activation_noise(mixed.statistics, mixed.ranges, mixed.scheme)
    found = []
    for rank in ranks:
        group = groups[rank.name]
        nodes = [node for node in mixed.model.nodes if node.name in group.nodes]
        activations = {name: noise[name] for name in mixed.model.activations(nodes) if name in noise}
        found.append(
            GroupSensitivity(
                group=group,
                rank=rank,
                saving_ms=savings.saving_ms.get(rank.name),
                activation=noisiest(activations),
                weight=noisiest(weight_noise(mixed.model, nodes, mixed.scheme)),
            )
        )
    return tuple(found)
