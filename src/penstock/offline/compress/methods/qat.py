"""``qat``: quantisation-aware training."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from penstock.artifact import Artifact
from penstock.offline.compress.method import Aim, Made, StepContext, TrainingMethod, needs_torch
from penstock.offline.compress.ptq.recipe import (
    RANGE_METHODS,
    MethodName,
    PlacementName,
    PtqRecipe,
    check_float,
    placed,
    prepared,
    quantize_with,
)


class QatMethod(TrainingMethod, frozen=True, kw_only=True):
    """Quantise a model to INT8, then train the integers and scales to reproduce the float model's outputs.

    Needs `pip install 'penstock[torch]'` but no labels. A fifth of --train is held out. If training does not improve the outputs on
    these samples, the untrained INT8 model is written, with a note. Try penstock quantize first: it takes seconds.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "penstock qat model.onnx --train train.npz --evaluate test.npz -o int8.onnx",
        "penstock qat model.onnx --train train.npz --epochs 50 --resume qat.checkpoints -o int8.onnx",
    )
    data_options: ClassVar[tuple[str, ...]] = ("--train", "--calibrate")

    method: MethodName = "best"
    """Calibration method for the initial ranges."""
    placement: PlacementName = "fastest"
    """Operators to quantise: linear, wide, or fastest, which measures both."""
    equalize: bool = True
    """Equalise the ranges of channels first."""

    @property
    def trains(self) -> bool:
        return True

    def examine(self, model: Artifact) -> None:
        check_float(model)

    def run(self, model: Artifact, context: StepContext) -> Made:
        training = needs_torch("training.qat")
        context.check_memory(model)
        start = prepared(model, context, self.equalize)
        placement = placed(start, context, self.placement, self.threads, self.budget_s)
        recipe = PtqRecipe(
            RANGE_METHODS.get(self.method), placement, equalize=False, reconstruct=False, correct_biases=False
        )
        int8 = context.once(
            "int8",
            lambda: quantize_with(recipe, start, context.data, context.scheme, context.stage("int8")),
            *(start.digest, recipe, context.scheme),
        )
        options = training.QatOptions()
        options = msgspec.structs.replace(options, fit=self.fit(options.fit))
        hooks = self.hooks(context, int8, "train")
        made = training.train_quantized(int8, start, context.data, options, teacher=context.teacher, **hooks)
        facts = made.provenance[-1].facts
        before, after = facts["held_out_loss"]
        note = f"loss on held-out samples: {before:.4g} before training, {after:.4g} after"
        short: dict[Aim, str] = {}
        if facts["kept"] == "start":
            short["accuracy"] = "training did not improve the model: the file is the untrained INT8 model"
        return Made(made, ("size", "speed"), {"placement": placement.value, "kept": facts["kept"]}, (note,), short)
