"""``distill``: train a student model on the outputs of a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from penstock.artifact import Artifact
from penstock.offline.compress.method import Aim, Made, StepContext, TrainingMethod, needs_torch
from penstock.offline.compress.model_files import naming, read_model_file
from penstock.offline.compress.options import File, Part, Positive, Usage
from penstock.offline.judge.judge import Judge
from penstock.offline.optimize.model import check_one_file
from penstock.offline.sessions import signature_of


class DistillMethod(TrainingMethod, frozen=True, kw_only=True):
    """Train a student model to reproduce the outputs of a teacher, on data with or without labels.

    Needs `pip install 'penstock[torch]'`. Training starts from the student's weights. More data help more than more epochs.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "penstock distill --student small.onnx --teacher large.onnx --train train.npz -o trained.onnx",
        "penstock distill --student small.onnx --teacher large.onnx --train train.npz --epochs 300 -o trained.onnx",
    )
    role: ClassVar[str] = "teacher"
    titles: ClassVar[tuple[str, str]] = ("teacher", "student")

    student: File
    """ONNX file to train, of any architecture."""
    temperature: Positive = 4.0
    """Softmax temperature of the loss; higher values emphasise the teacher's small probabilities. Usually 2 to 8."""
    teacher_share: Annotated[Part | None, Usage(default="70%, without labels 100%")] = None
    """Weight of the teacher in the loss; the labels have the remaining weight."""

    @property
    def trains(self) -> bool:
        return True

    @property
    def folds(self) -> bool:
        return False

    def examine(self, model: Artifact) -> None:
        start = read_model_file(Path(self.student), "student")
        with naming(Path(self.student), "student"):
            check_one_file(start, "training")
            own = signature_of(start)
        needs_torch("training.distill").check_signatures(own, signature_of(model))

    def run(self, model: Artifact, context: StepContext) -> Made:
        training = needs_torch("training.distill")
        start = read_model_file(Path(self.student), "student")
        options = training.DistillOptions()
        options = msgspec.structs.replace(
            options, fit=self.fit(options.fit), temperature=self.temperature, teacher_share=self.teacher_share
        )
        made = training.distill(start, model, context.data, options, **self.hooks(context, start, "train"))
        accuracy, notes, short = None, tuple[str, ...](), dict[Aim, str]()
        if context.evaluation is not None:
            judge = Judge(model, context.evaluation, contract=self.contract)
            before, after = (judge.assess(student).accuracy for student in (start, made))
            accuracy = before.value
            notes = (f"{judge.metric} of the student: {before.shown} before training, {after.shown} after",)
            gain = after.value - before.value
            if (gain if judge.reference.choice.metric.higher else -gain) <= 0:
                short["accuracy"] = "training did not improve the accuracy on the evaluation data"
        facts = {"student": {"size_bytes": start.size_bytes, "accuracy": accuracy}}
        return Made(made, ("size", "speed"), facts, notes, short)
