"""Structured pruning with recovery: cut a little, train what is left to answer as the original, look, and go on.

Needs the extra ``torch``. ``structured.narrow`` cuts once and does not train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from penstock.artifact import Artifact, sha256
from penstock.errors import ContractUnmet, InvalidArgument, InvalidConfig
from penstock.offline.compress.pruning.cut import Structure
from penstock.offline.compress.pruning.held_out import HeldOut, split
from penstock.offline.compress.pruning.importance import Scores, by_activation, by_batch_norm, by_norm
from penstock.offline.compress.pruning.latency import LatencyTable, Layer
from penstock.offline.compress.pruning.norms import refresh_norms
from penstock.offline.compress.pruning.structured import apply, cuttable, measured_speedup, probe
from penstock.offline.compress.pruning.taylor import by_taylor
from penstock.offline.compress.pruning.widths import best_units, fastest_for_least, make_grid
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.compress.training.archive import read_archive, write_archive
from penstock.offline.compress.training.distill import recover
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.teacher import Teacher
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.dataset import Dataset
from penstock.offline.tune.contract import Contract

Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class ShrinkOptions(msgspec.Struct, frozen=True):
    """How far to go, and what it may cost."""

    speedup: float = 1.5
    """How many times faster the model shall be at one sample a call."""
    contract: Contract = Contract()
    """What every round must meet on the held-out data; its latency is not looked at."""
    share: Share = 0.1
    """Share of the layers' present time that a round takes away, or one step of width if that is more."""
    rounds: Annotated[int, msgspec.Meta(ge=1, le=100)] = 16
    """The most cuts."""
    importance: Literal["activation", "norm", "batch_norm", "taylor"] = "activation"
    fit: FitOptions = FitOptions(epochs=10, learning_rate=1e-3)
    """Training after every cut."""
    second_chance: Annotated[float, msgspec.Meta(ge=0)] = 3.0
    """Where a round does not meet the contract, it is trained for this many times ``fit.epochs`` more; 0 for never."""
    block: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Widths are multiples of this, as in ``NarrowOptions``."""
    least: Share = 0.125
    """Share of its units that a group keeps at least."""
    heads: bool = True
    exact: bool = True
    threads: int = 1
    """For which latency is measured."""

    def check(self) -> None:
        """Raises InvalidConfig for what makes no sense."""
        self.fit.check()
        if not self.speedup > 1 or self.threads < 1:
            raise InvalidConfig(
                f"shrinking cannot use speedup={self.speedup}, threads={self.threads}",
                "speedup > 1, threads at least 1",
            )


class Round(msgspec.Struct, frozen=True):
    """What one round came to."""

    cut: bool
    """Whether it cut, or trained on."""
    start: int
    """The round that it went on from, -1 for the original."""
    narrowed: list[str]
    """The groups that were cut, in this round or in the one that it trains on."""
    units: dict[str, int]
    """What each group has left."""
    speedup: float
    """Of the whole model against the original, measured on this machine."""
    accuracy: float
    loss: float
    """On held-out samples, against the original."""
    objection: str
    """Why it does not meet the contract; empty if it does."""


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
    """The fastest model of the run that meets the contract on ``held_out``, by default the last fifth of ``data``.

    Each round cuts and distils from ``artifact``; labels join in if ``data`` has them. Where a round fails for good, the groups
    that it cut stay as they were before, and others go on. The run ends when the speed-up is reached or nothing is left to cut.
    ``folder`` keeps every round: a run of the same model, data and options goes on from there, with a larger goal too. The run
    ends before its next round when ``is_over``. Facts: every round; the one
    ``chosen``; whether it ``reached`` the speed-up. Widths depend on what this machine measures.
    Raises ContractUnmet, with the rounds, if none met the contract; InvalidConfig; InvalidData; Unsupported if nothing can be cut
    or the model has operators that cannot be trained; InvalidArgument if ``folder`` holds another run.
    """
    options = options or ShrinkOptions()
    options.check()
    if held_out is None:
        data, held_out = split(artifact, data)
    run = _Run(artifact, data, HeldOut(artifact, held_out, options.threads), options, folder)
    while not is_over() and (move := next_move(run.rounds, options)) is not None:
        on_progress(sum(entry.cut for entry in run.rounds), options.rounds + 1)
        if not run.take(*move):
            break
    on_progress(options.rounds + 1, options.rounds + 1)
    return run.result()


def next_move(rounds: Sequence[Round], options: ShrinkOptions) -> tuple[bool, int] | None:
    """Whether to cut (true) or to train on (false), and from which round; None at the goal or when the cuts are used up. Pure."""
    if rounds and rounds[-1].objection and rounds[-1].cut and options.second_chance:
        return False, len(rounds) - 1
    good = max((number for number, entry in enumerate(rounds) if not entry.objection), default=-1)
    reached = good >= 0 and rounds[good].speedup >= options.speedup
    return None if reached or sum(entry.cut for entry in rounds) >= options.rounds else (True, good)


def given_up(rounds: Sequence[Round]) -> set[str]:
    """The groups that failed for good when they were narrowed: they stay as they are. Pure."""
    trained_on = {entry.start for entry in rounds if not entry.cut}
    failed = [entry for number, entry in enumerate(rounds) if entry.objection and number not in trained_on]
    return {name for entry in failed for name in entry.narrowed}


class _Run:
    """The rounds so far, the present model and the best one."""

    def __init__(
        self, artifact: Artifact, data: Dataset, judge: HeldOut, options: ShrinkOptions, folder: Path | None
    ) -> None:
        self.original, self.data, self.judge, self.options, self.folder = artifact, data, judge, options, folder
        structure = Structure(artifact, exact=options.exact)
        names = cuttable(structure, heads=options.heads)
        self._groups = {name: structure.group(name) for name in names}
        self._teacher = Teacher(artifact, data)
        self._sample = probe(artifact, data)
        self._known: dict[Layer, float] = {}
        decisive = msgspec.structs.replace(options, speedup=0.0, rounds=1)  # how far to go does not decide how
        origin = [artifact.digest, data.digest, judge.data.digest, msgspec.to_builtins(decisive)]
        self._origin = sha256(msgspec.json.encode(origin, order="sorted"))
        self.rounds: list[Round] = []
        self.chosen = -1
        self._models = {-1: artifact}

    def take(self, cut: bool, start: int) -> bool:
        """Do a round, or fetch it from the folder; false if nothing was left to cut."""
        number = len(self.rounds)
        path = self.folder / f"round-{number:03}.npz" if self.folder else None
        found = self._stored(path) if path else None
        if found is None:
            ready, narrowed = (
                self._cut(self._models[start]) if cut else (self._models[start], self.rounds[start].narrowed)
            )
            if not narrowed:
                return False
            model = self._trained(ready, number, self.options.fit.epochs * (1 if cut else self.options.second_chance))
            found = model, self._judged(model, cut, start, narrowed)
            if path:
                about = {"origin": self._origin, "round": msgspec.to_builtins(found[1])}
                write_archive(path, {"model": np.frombuffer(model.data, np.uint8)}, about)
        self._models[number], entry = found
        self.rounds.append(entry)
        if not entry.objection and (self.chosen < 0 or entry.speedup > self.rounds[self.chosen].speedup):
            self.chosen = number
        good = max((n for n, entry in enumerate(self.rounds) if not entry.objection), default=-1)
        self._models = {n: model for n, model in self._models.items() if n in (self.chosen, good, number)}
        return True

    def result(self) -> Artifact:
        """The best model, with the story of the run."""
        rounds = msgspec.to_builtins(self.rounds)
        if self.chosen < 0:
            why = self.rounds[-1].objection if self.rounds else "nothing could be cut that would save time"
            unmet = ContractUnmet(
                f"no round of structured pruning meets the contract: {why}",
                "allow a larger loss, more epochs, smaller steps, or give more data",
            )
            unmet.candidates = tuple(rounds)
            raise unmet
        chosen = self.rounds[self.chosen]
        facts = {
            "metric": self.judge.judge.metric,
            "original_accuracy": self.judge.original.value,
            "accuracy": chosen.accuracy,
            "loss": chosen.loss,
            "samples": self.judge.data.count,
            "chosen": self.chosen,
            "reached": chosen.speedup >= self.options.speedup,
            "rounds": rounds,
        }
        model = self._models[self.chosen]
        return self.original.derive(model.data, "shrink", msgspec.to_builtins(self.options), facts)

    def _cut(self, model: Artifact) -> tuple[Artifact, list[str]]:
        """The model narrowed by a share of its time, and the groups that were cut; none if nothing would save time."""
        structure = Structure(model, exact=self.options.exact)
        scores = self._scores(structure)
        table = LatencyTable(structure, self._sample, self.options.threads, self._known)
        units, grids, left_alone = {}, {}, given_up(self.rounds)
        for group in structure.groups:
            origin = self._groups.get(group.name)
            # The last head, or the last group of a convolution, is no unit any more.
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

    def _scores(self, structure: Structure) -> Scores:
        match self.options.importance:
            case "taylor":
                return by_taylor(structure, self.data)
            case "activation":
                return by_activation(structure, self.data, threads=self.options.threads)
            case "batch_norm":
                return by_batch_norm(structure)
            case _:
                return by_norm(structure)

    def _trained(self, start: Artifact, number: int, epochs: float) -> Artifact:
        fit = msgspec.structs.replace(self.options.fit, epochs=epochs, seed=self.options.fit.seed + number)
        # What BatchNormalization knew of its inputs was true before the cut; training alone is slow to make up for that.
        model = TrainableModel(refresh_norms(start, self.data, threads=fit.threads))
        report = recover(model, self.data, self._teacher, fit)
        return model.to_artifact("retrain", msgspec.to_builtins(fit), report.facts())

    def _judged(self, model: Artifact, cut: bool, start: int, narrowed: list[str]) -> Round:
        accuracy, _ = self.judge.assess(model)
        groups = Structure(model, exact=self.options.exact).groups
        return Round(
            cut=cut,
            start=start,
            narrowed=narrowed,
            units={group.name: group.units for group in groups if group.name in self._groups},
            speedup=round(measured_speedup(self.original, model, self._sample, self.options.threads), 3),
            accuracy=accuracy.value,
            loss=accuracy.loss.value,
            objection=self.options.contract.accuracy_objection(accuracy),
        )

    def _stored(self, path: Path) -> tuple[Artifact, Round] | None:
        archive = read_archive(path)
        if archive is None:
            return None
        arrays, about = archive
        if about.get("origin") != self._origin:
            raise InvalidArgument(
                f"'{path.parent.name}' holds a pruning run of another model, other data or other options",
                "give another folder, or delete this one",
            )
        return Artifact.from_bytes(arrays["model"].tobytes()), msgspec.convert(about["round"], Round)
