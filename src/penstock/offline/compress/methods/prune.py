"""``prune``: set the smallest weights to zero."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

import msgspec

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument
from penstock.offline.compress.method import Made, StepContext, TrainingMethod, needs_torch
from penstock.offline.compress.options import NotNegative, Part, Positive, Spell, Usage
from penstock.offline.compress.pruning.layer_sparsity import allocate, measure_layers
from penstock.offline.compress.pruning.magnitude import LAYER_CAP, GlobalRule, PruneOptions, prune
from penstock.offline.compress.pruning.n_m import NMOptions, prune_n_m
from penstock.perf.chart import Scale, line_chart

_ITERATIVE = Usage(needs={"iterative": ()})
_Sparsity = Annotated[float, msgspec.Meta(ge=0, le=LAYER_CAP), Usage("share")]


class PruneMethod(TrainingMethod, frozen=True, kw_only=True):
    """Set the smallest weights of a model to zero. The ONNX file keeps its size; the coded model becomes small (see penstock
    share).

    --iterative needs --train and `pip install 'penstock[torch]'`. It measures accuracy on a fifth of the data, and stops before the
    loss exceeds --max-accuracy-loss. --chart plots accuracy against sparsity, for each layer alone or for the levels of --iterative.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "penstock prune model.onnx --sparsity 70% --evaluate test.npz -o pruned.onnx",
        "penstock prune model.onnx --iterative --train train.npz --evaluate test.npz --sparsity 95% -o pruned.onnx",
    )

    sparsity: _Sparsity = 0.9
    """Fraction of weights to set to zero."""
    per_layer: bool = False
    """Choose the sparsity of each layer by the layer's sensitivity, measured on --train."""
    n_m: Annotated[str | None, Usage(excludes=("iterative", "per_layer", "sparsity"))] = None
    """Keep N of every M weights, e.g. 2:4, instead of pruning to --sparsity."""
    iterative: Annotated[bool, Usage(excludes=("per_layer",))] = False
    """Alternate pruning and training, within --max-accuracy-loss."""
    levels: Annotated[int, msgspec.Meta(ge=1, le=100), _ITERATIVE] = 8
    """Number of rounds of pruning and training; each round is one level of sparsity."""
    max_accuracy_loss: Annotated[Part, _ITERATIVE] = 0.005
    """Maximum loss of accuracy against the original, e.g. 0.5%."""
    skip: tuple[str, ...] = ()
    """Name of a weight to skip; may be repeated."""
    chart: Annotated[str | None, Usage("file", writes="picture")] = None
    """Also write a chart to this SVG file."""
    epochs: Annotated[Positive | None, Usage(default="the method's"), _ITERATIVE] = None
    resume: Annotated[str | None, Usage("file"), _ITERATIVE] = None
    second_chance: Annotated[NotNegative, Usage(hidden=True)] = 3.0
    """If a level fails, train it again for this multiple of its epochs. 0: never."""

    @property
    def trains(self) -> bool:
        return self.iterative

    @property
    def needs_fp32(self) -> bool:
        return self.trains

    def reason_for_data(self) -> str:
        return "training" if self.iterative else "measuring the sensitivity of each layer" if self._measures else ""

    def check(self, spell: Spell = str) -> None:
        super().check(spell)
        self._pattern()

    def run(self, model: Artifact, context: StepContext) -> Made:
        goal, picture = PruneOptions(GlobalRule(self.sparsity), skip=self.skip), ""
        pattern = self._pattern()
        if self._measures:
            contract = self.allowance(context, self.max_accuracy_loss)
            found = measure_layers(model, context.data, goal, on_progress=context.stage("layers"), contract=contract)
            picture = found.chart()
            if self.per_layer:
                goal = PruneOptions(allocate(found.curves, self.sparsity).rule, skip=self.skip)
        if self.iterative:
            made = self._in_turn(model, goal, context)
            picture = _levels_chart(made.provenance[-1].facts)
        else:
            made = prune_n_m(model, pattern) if pattern else prune(model, goal)
        facts = made.provenance[-1].facts
        notes = [f"{facts['sparsity']:.2%} of {facts['weights']} weights are zero, {facts['fewer']:g}x fewer are left"]
        if pattern:
            notes.append("only engines with support for the pattern become faster; CPUs do not")
        return Made(
            made,
            ("coded_size",),
            {"sparsity": facts["sparsity"], "chart": self.chart},
            tuple(notes),
            files={self.chart: picture.encode()} if self.chart else {},
        )

    @property
    def _measures(self) -> bool:
        return not self.iterative and (self.per_layer or self.chart is not None)

    def _pattern(self) -> NMOptions | None:
        if self.n_m is None:
            return None
        match = re.fullmatch(r"(\d{1,2}):(\d{1,2})", self.n_m.strip())
        if match is None or not 1 <= int(match[1]) < int(match[2]) <= 64:
            raise InvalidArgument(
                f"'{self.n_m}' is not a pattern N:M", "give two numbers, such as 2:4, with N below M and M at most 64"
            )
        return NMOptions(int(match[1]), int(match[2]), skip=self.skip)

    def _in_turn(self, model: Artifact, goal: PruneOptions, context: StepContext) -> Artifact:
        context.check_memory(model)
        iterative = needs_torch("pruning.iterative")
        options = iterative.IterativeOptions(
            goal=goal,
            levels=self.levels,
            contract=self.allowance(context, self.max_accuracy_loss),
            retrain=self.fit(iterative.IterativeOptions().retrain),
            second_chance=self.second_chance,
        )
        made: Artifact = iterative.prune_iteratively(
            model,
            context.data,
            options,
            held_out=context.judge.data if context.judge else None,
            folder=context.folder,
            on_progress=context.stage("levels"),
            is_over=context.is_over,
        )
        return made


def _levels_chart(facts: dict[str, Any]) -> str:
    """SVG of accuracy against sparsity, for the levels and for the original pruned in one step."""
    levels = [(level["sparsity"], level["accuracy"]) for level in facts["levels"]]
    scales = Scale("sparsity", "{:.0%}"), Scale(facts["metric"], "{:.1%}")
    lines = {"at once": facts["one_shot"], "iterative": levels}
    return line_chart(lines, "Accuracy by sparsity", *scales, [("original", facts["original_accuracy"])])
