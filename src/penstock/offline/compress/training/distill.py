"""Distillation: train a student to reproduce a teacher's outputs (Hinton, Vinyals, Dean 2015), with or without labels.

The loss has one term for each output. The term depends on the kind of the output:

- Class scores, [n, classes], with labels: ``(1 - share) CE(labels) + share T² KL(teacher ‖ student)``. Both distributions are softened
  by the temperature T. If an output has probabilities, T divides their logarithms. The factor T² keeps gradients independent of T.
- Values: the squared error divided by the teacher's variance.
- Rows of numbers that may be scores or values, without labels: the sum of both terms, which have the same optimum.

Hints (Romero et al. 2015, FitNets) add squared errors between tensors inside the graphs. 1×1 adaptors match their channels.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.compress.options import NotNegative, Options, Positive
from penstock.offline.compress.training.fit import fit
from penstock.offline.compress.training.hints import Hints
from penstock.offline.compress.training.options import FitOptions, FitReport, Hooks
from penstock.offline.compress.training.parity import check_parity
from penstock.offline.compress.training.teacher import Teacher
from penstock.offline.compress.training.torch import Tensor, functional, torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.judge.detect import scored_output
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.names import varying_outputs
from penstock.offline.sessions import signature_of
from penstock.tensor import Array, Signature

_TINY = 1e-12
_PARITY = 1e-4
"""Maximum relative error of a float graph in torch against ONNX Runtime; with a larger error, training fails.

A different order of summation causes errors of about 1e-6. A wrong operator causes far larger errors. INT8 graphs are not checked,
because rounding may change their integers.
"""


class DistillOptions(Options, frozen=True):
    """Options of distillation."""

    fit: FitOptions = FitOptions(epochs=100)
    temperature: Positive = 4.0
    """T, the softmax temperature of the loss. Higher values emphasise the teacher's small probabilities. Usually 2 to 8."""
    teacher_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Weight of the teacher in the loss. The labels have the remaining weight. Default: 0.7; without labels, 1."""
    hints: dict[str, str] = {}
    """Names of tensors inside the student, mapped to the names of the teacher's tensors that they should resemble."""
    hint_weight: NotNegative = 1.0


class OutputKind(enum.Enum):
    """The kind of an output, which determines the output's loss."""

    LOGITS = "logits"
    PROBABILITIES = "probabilities"
    VALUES = "values"
    EITHER = "either"
    """Logits or values, which cannot be distinguished without labels."""


class DistillationLoss:
    """The loss of a student against ``teacher`` and, if given, against ``labels`` (int [samples])."""

    def __init__(self, student: Artifact, teacher: Teacher, labels: Array | None, options: DistillOptions) -> None:
        """Raises InvalidData if the labels fit no output, Unsupported if no output is of a float type."""
        options.check()
        outputs, known = varying_outputs(read_proto(student).graph), teacher.answers
        answers = {name: known[name] for name in outputs if name in known and known[name].dtype.kind == "f"}
        if not answers:
            raise Unsupported(
                "the model has no float output from which a student can learn",
                "give a model with a float output",
            )
        self.teacher, self.temperature = teacher, options.temperature
        self.labelled = "" if labels is None else scored_output(answers, labels)
        self.labels = None if labels is None else torch.tensor(labels.astype(np.int64))
        share = options.teacher_share
        self.share = (0.7 if labels is not None else 1.0) if share is None else share
        self.kinds = {name: _kind(array, name == self.labelled) for name, array in answers.items()}
        self._variances = {name: _variance(array) for name, array in answers.items()}
        probabilities = {name for name, kind in self.kinds.items() if kind is OutputKind.PROBABILITIES}
        self.logits = {
            node.output[0]: node.input[0]
            for node in read_proto(student).graph.node
            if node.op_type == "Softmax"
            and node.output[0] in probabilities
            and all(a.i == -1 for a in node.attribute if a.name == "axis")
        }
        """For each output computed by a Softmax, the Softmax's input. The log-softmax of this input does not underflow."""

    def __call__(self, tensors: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        answers = self.teacher(tensors, rows)
        return torch.stack([self._term(name, tensors, answers[name], rows) for name in self.kinds]).sum()

    def _term(self, name: str, tensors: Mapping[str, Tensor], answer: Tensor, rows: Tensor) -> Tensor:
        given, kind = tensors[name], self.kinds[name]
        if given.shape != answer.shape:
            raise InvalidArgument(
                f"output '{name}' has shape {list(given.shape)}, but the teacher's has {list(answer.shape)}",
                "give a student whose outputs have the teacher's shapes",
            )
        if kind is OutputKind.VALUES:
            return self._squares(name, given, answer)
        if kind is OutputKind.PROBABILITIES:
            logits = tensors.get(self.logits.get(name, ""))
            given = given.clamp_min(_TINY).log() if logits is None else logits
            answer = answer.clamp_min(_TINY).log()
        soft = soft_divergence(given, answer, self.temperature)
        if name == self.labelled and self.labels is not None:
            return self.share * soft + (1 - self.share) * functional.cross_entropy(given, self.labels[rows])
        return soft + self._squares(name, given, answer) if kind is OutputKind.EITHER else soft

    def _squares(self, name: str, given: Tensor, answer: Tensor) -> Tensor:
        return functional.mse_loss(given, answer) / self._variances[name]


def soft_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² KL(softmax(teacher / T) ‖ softmax(student / T)) over the last axis, averaged over all other axes."""
    given = functional.log_softmax(student / temperature, dim=-1).flatten(0, -2)
    target = functional.log_softmax(teacher / temperature, dim=-1).flatten(0, -2)
    return temperature**2 * functional.kl_div(given, target, reduction="batchmean", log_target=True)


def recover(
    model: TrainableModel, data: Dataset, teacher: Artifact | Teacher, options: FitOptions, **hooks: Unpack[Hooks]
) -> FitReport:
    """Train ``model`` in place to reproduce the outputs of ``teacher``, the model before compression. Also uses labels in the data.

    Raises the errors of ``fit``; InvalidData if labels fit no output or an output of the teacher is not finite; InvalidModel if
    torch and ONNX Runtime compute different outputs.
    """
    return _distill(model, data, teacher, DistillOptions(fit=options), hooks)


def distill(
    student: Artifact, teacher: Artifact, data: Dataset, options: DistillOptions | None = None, **hooks: Unpack[Hooks]
) -> Artifact:
    """Train ``student``, of any architecture, to reproduce the outputs of ``teacher``. Both need the same inputs and outputs.

    Raises InvalidArgument if inputs or outputs differ, Unsupported if the student has an operator that cannot be trained, and the
    errors of ``recover``.
    """
    options = options or DistillOptions()
    check_signatures(signature_of(student), signature_of(teacher))
    model = TrainableModel(student)
    report = _distill(model, data, teacher, options, hooks)
    facts = {**report.facts(), "teacher": teacher.digest, "samples": data.count, "labels": data.classes is not None}
    return model.to_artifact("distill", msgspec.to_builtins(options), facts)


def _distill(
    model: TrainableModel, data: Dataset, teacher: Artifact | Teacher, options: DistillOptions, hooks: Hooks
) -> FitReport:
    options.check()
    if isinstance(teacher, Artifact):
        teacher = Teacher(teacher, data, also=sorted(set(options.hints.values())), live="augment" in hooks)
    loss = DistillationLoss(model.artifact, teacher, data.classes, options)
    hints = Hints(model, data, teacher, options.hints, options.fit.seed)
    if all(node.op_type != "QuantizeLinear" for node in read_proto(model.artifact).graph.node):
        check_parity(TrainableModel(model.artifact), data, tolerance=_PARITY)

    def total(tensors: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        value = loss(tensors, rows)
        return value + options.hint_weight * hints(tensors, rows) if options.hints else value

    given = hooks.get("parameters")
    parameters = list(model.parameters() if given is None else given)
    origin = [hooks.get("depends_on", ""), teacher.digest, msgspec.to_builtins(options)]
    more: dict[str, Any] = {
        "parameters": parameters + hints.parameters,
        "also": [*hooks.get("also", ()), *loss.logits.values(), *options.hints],
        "depends_on": repr(origin),
    }
    return fit(model, data, total, options.fit, **{**hooks, **more})


def _kind(answer: Array, labelled: bool) -> OutputKind:
    if answer.ndim >= 2 and answer.shape[-1] >= 2:
        sums = answer.sum(axis=-1, dtype=np.float64)
        if answer.min() >= 0 and np.abs(sums - 1).max() < 1e-3:
            return OutputKind.PROBABILITIES
        if labelled:
            return OutputKind.LOGITS
        if answer.ndim == 2:
            return OutputKind.EITHER
    return OutputKind.VALUES


def _variance(answer: Array) -> float:
    """The variance of an output over samples, averaged over elements. For a constant output, the mean square, or 1 if that is zero."""
    spread = float(answer.astype(np.float64).var(axis=0).mean())
    square = float((answer.astype(np.float64) ** 2).mean())
    return spread if spread > 1e-9 * square else square or 1.0


def check_signatures(ours: Signature, theirs: Signature) -> None:
    """Raise InvalidArgument if a student with signature ``ours`` cannot learn from a teacher with ``theirs``."""
    for what in ("inputs", "outputs"):
        given = {spec.name: spec for spec in getattr(ours, what)}
        wanted = {spec.name: spec for spec in getattr(theirs, what)}
        if given.keys() != wanted.keys():
            raise InvalidArgument(
                f"student and teacher differ: {what} {sorted(given)} in the student, {sorted(wanted)} in the teacher",
                "give a student with the teacher's inputs and outputs",
            )
        for name, spec in given.items():
            ours_shown, theirs_shown = (f"{one.datatype.value} {list(one.shape)}" for one in (spec, wanted[name]))
            fits = spec.datatype is wanted[name].datatype and len(spec.shape) == len(wanted[name].shape)
            if not fits or any(
                -1 not in pair and pair[0] != pair[1] for pair in zip(spec.shape, wanted[name].shape, strict=True)
            ):
                raise InvalidArgument(
                    f"student and teacher differ: '{name}' is {ours_shown} in the student, {theirs_shown} in the teacher",
                    "give a student with the teacher's inputs and outputs",
                )
