"""Structured pruning with recovery. Each round cuts channels, trains the model to reproduce the original's outputs, and judges it.

Needs the extra ``torch``. To cut once without training, use ``search.narrow``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.offline.compress.options import NotNegative, Share
from penstock.offline.compress.pruning.rounds import RoundEntry, Rounds, last_good
from penstock.offline.compress.pruning.structured.cut import Structure
from penstock.offline.compress.pruning.structured.importance import importance
from penstock.offline.compress.pruning.structured.latency import LatencyTable, TimedLayer
from penstock.offline.compress.pruning.structured.norms import refresh_norms
from penstock.offline.compress.pruning.structured.search import CutOptions, apply, cuttable, measured_speedup, probe
from penstock.offline.compress.pruning.structured.taylor import by_taylor
from penstock.offline.compress.pruning.structured.widths import best_units, fastest_for_least, make_grid
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.compress.training.distill import recover
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.teacher import Teacher
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge, hold_out


class ShrinkOptions(CutOptions, frozen=True, kw_only=True):
    """The goal, the steps, and the allowed loss."""

    speedup: Annotated[float, msgspec.Meta(gt=1)] = 1.5
    """Required speed-up of the model with one sample per call."""
    contract: Contract = Contract()
    """The contract that every round must meet on the held-out data. The contract's latency limit is ignored."""
    share: Share = 0.1
    """Fraction of the layers' current time that one round should save. A round narrows at least one group by at least one step."""
    rounds: Annotated[int, msgspec.Meta(ge=1, le=100)] = 16
    """Maximum number of cuts."""
    importance: Literal["activation", "norm", "batch-norm", "taylor"] = "activation"
    fit: FitOptions = FitOptions(epochs=10, learning_rate=1e-3)
    """Training after every cut."""
    second_chance: NotNegative = 3.0
    """If a round fails the contract, train it for this multiple of ``fit.epochs``. 0: never."""
    least: Share = 0.125
    """Minimum fraction of units to keep in a group."""


class Round(RoundEntry, frozen=True, kw_only=True):
    """The result of one round."""

    cut: bool
    """True if the round cut channels, False if it only trained."""
    narrowed: list[str]
    """The groups that were cut in this round. If the round only trained, the groups of the preceding cut."""
    units: dict[str, int]
    """The number of units left in each group."""
    speedup: float
    """Measured speed-up of the whole model against the original."""


def shrink(
    artifact: Artifact,
    data: Dataset,
    options: ShrinkOptions | None = None,
    *,
    held_out: Dataset | None = None,
    folder: Path | None = None,
    on_progress: Progress = no_progress,
    is_over: Callable[[], bool] = lambda: False,
) -> Artifact:
    """Return the fastest model of the run that meets the contract on ``held_out``, which defaults to the last fifth of ``data``.

    Each round cuts channels, then trains by distillation from ``artifact``, with labels if ``data`` has labels. If a round fails after
    extra training, its groups keep their previous widths and other groups are cut. The run ends when the speed-up is reached, no more
    channels can be cut, or ``is_over()`` is true. ``folder`` stores every round. A later call with the same arguments, or with another
    speed-up, continues from this folder. The provenance step records every round, the number of the ``chosen`` round, and whether that
    round ``reached`` the speed-up. The widths depend on measured times. Raises ContractUnmet, with all rounds as ``candidates``, if no
    round meets the contract; InvalidConfig; InvalidData; Unsupported if nothing can be cut or an operator cannot be trained;
    InvalidArgument if ``folder`` holds another run.
    """
    options = options or ShrinkOptions()
    options.check()
    if held_out is None:
        data, held_out = hold_out(artifact, data)
    judge = Judge(artifact, held_out, options.threads, contract=options.contract)
    # A run towards a lower speed-up has the same first rounds as a run towards a higher one.
    decides = data.digest, msgspec.to_builtins(msgspec.structs.replace(options, speedup=0.0))
    rounds = Rounds(Round, "round", judge, options.contract, lambda entry: entry.speedup, folder, *decides)
    shrinker = _Shrinker(artifact, data, options)
    while not is_over() and (move := next_move(rounds.entries, options)) is not None:
        on_progress(sum(entry.cut for entry in rounds.entries), options.rounds + 1)
        if not rounds.take(lambda _, move=move: shrinker.round(rounds, *move)):  # type: ignore[misc]
            break
    on_progress(options.rounds + 1, options.rounds + 1)
    why = "there was no time for a round" if is_over() else "no cut would save time"
    why = rounds.entries[-1].objection if rounds.entries else why
    model, facts = rounds.result(
        f"no round of structured pruning meets the contract: {why}",
        "allow a larger loss, more epochs, smaller steps, or give more data",
    )
    facts["reached"] = rounds.entries[rounds.best].speedup >= options.speedup
    return artifact.derive(model, "shrink", msgspec.to_builtins(options), facts)


def next_move(rounds: Sequence[Round], options: ShrinkOptions) -> tuple[bool, int] | None:
    """The next round: True if it cuts or False if it only trains, and the number of the round from which it starts. None at the
    end."""
    if rounds and rounds[-1].objection and rounds[-1].cut and options.second_chance:
        return False, len(rounds) - 1
    good = last_good(rounds)
    reached = good >= 0 and rounds[good].speedup >= options.speedup
    return None if reached or sum(entry.cut for entry in rounds) >= options.rounds else (True, good)


def given_up(rounds: Sequence[Round]) -> set[str]:
    """The groups whose cut failed the contract even after extra training."""
    trained_on = {entry.start for entry in rounds if not entry.cut}
    failed = [entry for number, entry in enumerate(rounds) if entry.objection and number not in trained_on]
    return {name for entry in failed for name in entry.narrowed}


class _Shrinker:
    """Performs the rounds of one run: cuts, trains, measures."""

    def __init__(self, artifact: Artifact, data: Dataset, options: ShrinkOptions) -> None:
        self.original, self.data, self.options = artifact, data, options
        structure = Structure(artifact, exact=options.exact)
        names = cuttable(structure, heads=options.heads)
        self._groups = {name: structure.group(name) for name in names}
        self._teacher = Teacher(artifact, data)
        self._sample = probe(artifact, data)
        self._known: dict[TimedLayer, float] = {}

    def round(self, rounds: Rounds[Round], cut: bool, start: int) -> tuple[Artifact, Round] | None:
        """Cut the model of round ``start`` and train it, or only train it further. Returns None if no more channels can be cut."""
        model = rounds.models[start]
        if cut:
            model, narrowed = self._cut(model, given_up(rounds.entries))
        else:
            narrowed = rounds.entries[start].narrowed
        if not narrowed:
            return None
        model = self._trained(model, len(rounds.entries), 1 if cut else self.options.second_chance)
        groups = Structure(model, exact=self.options.exact).groups
        units = {group.name: group.units for group in groups if group.name in self._groups}
        faster = measured_speedup(self.original, model, self._sample, self.options.threads)
        return model, Round(cut=cut, start=start, narrowed=narrowed, units=units, speedup=round(faster, 3))

    def _cut(self, model: Artifact, left_alone: Collection[str]) -> tuple[Artifact, list[str]]:
        """The model with fewer channels, so that a fraction of its time is saved, and the groups that were cut, if any."""
        structure = Structure(model, exact=self.options.exact)
        if self.options.importance == "taylor":
            scores = by_taylor(structure, self.data)
        else:
            scores = importance(structure, self.options.importance, self.data, self.options.threads)
        table = LatencyTable(structure, self._sample, self.options.threads, self._known)
        units, grids = {}, {}
        for group in structure.groups:
            origin = self._groups.get(group.name)
            # A single remaining head or convolution group is no longer a unit.
            if group.name in left_alone or origin is None or not group.cuttable:
                continue
            if group.unit_size == origin.unit_size:
                grid = make_grid(origin, self.options.block, self.options.least)
                units[group.name] = group.units
                grids[group.name] = grid._replace(floor=max(grid.floor, len(group.frozen)))
        (full,) = table.totals([{}])
        counts, _ = fastest_for_least(structure, scores, table, units, full * (1 - self.options.share), grids)
        narrowed = [name for name in counts if counts[name] < units[name]]
        return apply(structure, best_units(structure, scores, counts), "cut", self.options), narrowed

    def _trained(self, start: Artifact, number: int, times: float) -> Artifact:
        fit = self.options.fit
        fit = msgspec.structs.replace(fit, epochs=times * fit.epochs, seed=fit.seed + number)
        # Training alone would only slowly correct the BatchNormalization statistics, which date from before the cut.
        model = TrainableModel(refresh_norms(start, self.data, threads=fit.threads))
        report = recover(model, self.data, self._teacher, fit)
        return model.to_artifact("retrain", msgspec.to_builtins(fit), report.facts())
