"""``prune-channels``: remove the least important channels and attention heads."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument
from penstock.offline.compress.method import Aim, Made, StepContext, TrainingMethod, needs_torch
from penstock.offline.compress.options import Count, NotNegative, Part, Positive, Share, Spell, Usage
from penstock.offline.compress.pruning.structured.cut import Structure
from penstock.offline.compress.pruning.structured.search import NarrowOptions, narrow

_RECOVER = Usage(needs={"recover": ()})


class PruneChannelsMethod(TrainingMethod, frozen=True, kw_only=True):
    """Remove the least important channels and attention heads of a model, which leaves a smaller dense model.

    --recover needs --train and `pip install 'penstock[torch]'`. With --width, channels are cut once, before training. With --speedup,
    cutting and training alternate until the model is fast enough, or until the loss of accuracy on a fifth of --train would exceed
    --max-accuracy-loss.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "penstock prune-channels model.onnx --width 75% --train train.npz --recover --evaluate test.npz -o narrow.onnx",
        "penstock prune-channels model.onnx --speedup 2 --train train.npz --recover --max-accuracy-loss 1% -o narrow.onnx",
    )

    width: Annotated[Share | None, Usage(default="75%, with --speedup 100%")] = None
    """Fraction of channels to keep in each group of layers; with --speedup, the maximum fraction."""
    speedup: Annotated[float, msgspec.Meta(gt=1)] | None = None
    """Required speed-up, e.g. 1.5; the fraction to keep is then chosen for each group."""
    importance: Literal["norm", "batch-norm", "activation", "taylor"] = "norm"
    """Measure of importance. activation and taylor need --train; taylor also needs torch."""
    recover: bool = False
    """Train the remaining weights to reproduce the original's outputs."""
    max_accuracy_loss: Annotated[Part, Usage(needs={"recover": (), "speedup": ()})] = 0.01
    """Maximum loss of accuracy against the original, e.g. 0.5%."""
    block: Count = 16
    """Keep a multiple of this number of channels in each layer."""
    heads: bool = True
    """Remove attention heads as well as channels."""
    epochs: Annotated[Positive | None, Usage(default="the method's"), _RECOVER] = None
    resume: Annotated[str | None, Usage("file"), _RECOVER] = None
    second_chance: Annotated[NotNegative, Usage(hidden=True)] = 3.0
    """If a round fails, train it again for this multiple of its epochs. 0: never."""

    @property
    def trains(self) -> bool:
        return self.recover

    @property
    def folds(self) -> bool:
        # Folding would remove the scales of BatchNormalization, from which the batch-norm importance is computed.
        return self.importance != "batch-norm"

    @property
    def needs_fp32(self) -> bool:
        return self.trains

    def reason_for_data(self) -> str:
        by_data = self.importance in ("activation", "taylor")
        return "--recover" if self.recover else f"--importance {self.importance}" if by_data else ""

    def check(self, spell: Spell = str) -> None:
        super().check(spell)
        if self._in_turn and (self.width is not None or self.importance == "batch-norm"):
            option = spell("width") if self.width is not None else f"{spell('importance')} batch-norm"
            raise InvalidArgument(
                f"{option} cannot be combined with {spell('speedup')} and {spell('recover')}", f"remove {option}"
            )

    def run(self, model: Artifact, context: StepContext) -> Made:
        short: dict[Aim, str] = {}
        if self._in_turn:
            made = self._shrink(model, context)
            facts = made.provenance[-1].facts
            if not facts["reached"]:
                found = facts["rounds"][facts["chosen"]]["speedup"]
                why = facts["rounds"][-1]["objection"] or "no more channels can be cut"
                short["speed"] = f"the run measured a speed-up of {found:.2f}x instead of {self.speedup:g}x: {why}"
        else:
            made = self._narrow(model, context)
        parameters = made.provenance[-1].facts.get("parameters") if not self.recover else None
        notes = (f"{parameters[1]} of {parameters[0]} parameters are left",) if parameters else ()
        return Made(made, ("size", "speed"), notes=notes, short=short)

    @property
    def _in_turn(self) -> bool:
        return self.recover and self.speedup is not None

    def _narrow(self, model: Artifact, context: StepContext) -> Artifact:
        usual = 0.75 if self.speedup is None else 1.0
        options = NarrowOptions(
            width=self.width or usual,
            speedup=self.speedup,
            importance="norm" if self.importance == "taylor" else self.importance,
            block=self.block,
            heads=self.heads,
            threads=self.threads,
        )
        progress, scores = context.stage("scores"), None
        if self.importance == "taylor":
            taylor = needs_torch("pruning.structured.taylor")
            scores = taylor.by_taylor(Structure(model, exact=options.exact), context.data, on_progress=progress)
        made = narrow(model, options, context.fitted, scores=scores, on_progress=progress)
        return self.recovered(made, context) if self.recover else made

    def _shrink(self, model: Artifact, context: StepContext) -> Artifact:
        context.check_memory(model)
        recovery = needs_torch("pruning.structured.recovery")
        options = recovery.ShrinkOptions(
            speedup=self.speedup,
            contract=self.allowance(context, self.max_accuracy_loss),
            importance=self.importance,
            fit=self.fit(recovery.ShrinkOptions().fit),
            second_chance=self.second_chance,
            block=self.block,
            heads=self.heads,
            threads=self.threads,
        )
        made: Artifact = recovery.shrink(
            model,
            context.data,
            options,
            held_out=context.judge.data if context.judge else None,
            folder=context.folder,
            on_progress=context.stage("rounds"),
            is_over=context.is_over,
        )
        return made
