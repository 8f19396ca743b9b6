"""Distillation: a student learns to answer as a teacher does (Hinton, Vinyals, Dean 2015), with labels or without.

Each output has its term in the loss. Class scores, [n, classes] of a model with labels, have
``(1 - share) CE(labels) + share T² KL(teacher ‖ student)``, both softened by the temperature T; T² keeps the size of the gradient.
Outputs that are probabilities are softened as their logarithms. Every other output has the squared error over the teacher's
variance. Where no label says whether a row of numbers is class scores or values, it has both terms: they agree in their optimum.
Hints (Romero et al. 2015, FitNets) are squared errors between tensors inside the graphs, over 1×1 adaptors that are thrown away.
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
from penstock.offline.judge.accuracy import make_reference
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import signature_of
from penstock.tensor import Array, Signature

_TINY = 1e-12
_PARITY = 1e-4
"""Relative error of a float graph in torch against ONNX Runtime, above which nothing is trained: sums in another order differ by
some 1e-6, an operator that is computed otherwise by far more. An INT8 graph may differ by a step of its integers."""


class DistillOptions(Options, frozen=True):
    """How to distil."""

    fit: FitOptions = FitOptions(epochs=100)
    temperature: Positive = 4.0
    """T: how much the teacher's small probabilities count; 2 to 8 is usual."""
    teacher_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """The teacher's part of the loss beside the labels'; by default 0.7, and 1 without labels."""
    hints: dict[str, str] = {}
    """Tensors of the student by name, each with the teacher's tensor that it should resemble."""
    hint_weight: NotNegative = 1.0


class OutputKind(enum.Enum):
    """The kind of an output, which decides its loss."""

    LOGITS = "logits"
    PROBABILITIES = "probabilities"
    VALUES = "values"
    EITHER = "either"
    """Logits or values: nothing says which."""


class DistillationLoss:
    """The loss of a student against ``teacher``, of ``labels`` (int [samples]) if there are any."""

    def __init__(self, student: Artifact, teacher: Teacher, labels: Array | None, options: DistillOptions) -> None:
        """Raises InvalidData if the labels fit no output, Unsupported if no output is of a float type."""
        options.check()
        outputs, known = [value.name for value in read_proto(student).graph.output], teacher.answers
        answers = {name: known[name] for name in outputs if name in known and known[name].dtype.kind == "f"}
        if not answers:
            raise Unsupported("no output of the model is a float, so that nothing can be learned from it")
        self.teacher, self.temperature = teacher, options.temperature
        self.labelled = "" if labels is None else make_reference(answers, labels).output
        self.labels = None if labels is None else torch.tensor(labels.astype(np.int64))
        share = options.teacher_share
        self.share = (0.7 if labels is not None else 1.0) if share is None else share
        self.kinds = {name: _kind(array, name == self.labelled) for name, array in answers.items()}
        self._variances = {name: _variance(array) for name, array in answers.items()}
        softened = _softmax_inputs(student)
        self.logits = {
            name: softened[name]
            for name, kind in self.kinds.items()
            if kind is OutputKind.PROBABILITIES and name in softened
        }
        """For outputs of a Softmax, its input, whose logarithms do not underflow."""

    def __call__(self, tensors: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        answers = self.teacher(tensors, rows)
        return torch.stack([self._term(name, tensors, answers[name], rows) for name in self.kinds]).sum()

    def _term(self, name: str, tensors: Mapping[str, Tensor], answer: Tensor, rows: Tensor) -> Tensor:
        given, kind, softened = tensors[name], self.kinds[name], self.logits.get(name, "")
        if given.shape != answer.shape:
            raise InvalidArgument(
                f"output '{name}' has shape {list(given.shape)}, the teacher's {list(answer.shape)}",
                "give a student whose outputs have the teacher's shapes",
            )
        if kind is OutputKind.VALUES:
            return self._squares(name, given, answer)
        if kind is OutputKind.PROBABILITIES:
            given = tensors[softened] if softened in tensors else given.clamp_min(_TINY).log()
            answer = answer.clamp_min(_TINY).log()
        soft = soft_divergence(given, answer, self.temperature)
        if name == self.labelled and self.labels is not None:
            return self.share * soft + (1 - self.share) * functional.cross_entropy(given, self.labels[rows])
        return soft + self._squares(name, given, answer) if kind is OutputKind.EITHER else soft

    def _squares(self, name: str, given: Tensor, answer: Tensor) -> Tensor:
        return functional.mse_loss(given, answer) / self._variances[name]


def soft_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² KL(softmax(teacher / T) ‖ softmax(student / T)) over the last axis, the mean over all others."""
    given = functional.log_softmax(student / temperature, dim=-1).flatten(0, -2)
    target = functional.log_softmax(teacher / temperature, dim=-1).flatten(0, -2)
    return temperature**2 * functional.kl_div(given, target, reduction="batchmean", log_target=True)


def recover(
    model: TrainableModel, data: Dataset, teacher: Artifact | Teacher, options: FitOptions, **hooks: Unpack[Hooks]
) -> FitReport:
    """Train ``model`` in place to answer as ``teacher``, the model that it was before it was compressed. Labels join in.

    Raises as ``fit``; InvalidData if labels fit no output or an answer of the teacher is not finite; InvalidModel if torch computes
    the graph otherwise than ONNX Runtime.
    """
    return _distill(model, data, teacher, DistillOptions(fit=options), hooks)


def distill(
    student: Artifact, teacher: Artifact, data: Dataset, options: DistillOptions | None = None, **hooks: Unpack[Hooks]
) -> Artifact:
    """``student``, of any architecture and any weights, trained to answer as ``teacher``; both have the same inputs and outputs.

    Raises InvalidArgument if inputs or outputs differ, and as ``recover``; Unsupported if the student has an operator that cannot
    be trained.
    """
    options = options or DistillOptions()
    check_signatures(signature_of(student), signature_of(teacher))
    model = TrainableModel(student)
    report = _distill(model, data, teacher, options, hooks)
    facts = {**report.facts(), "teacher": teacher.digest, "samples": data.count, "labels": data.labels is not None}
    return model.to_artifact("distill", msgspec.to_builtins(options), facts)


def _distill(
    model: TrainableModel, data: Dataset, teacher: Artifact | Teacher, options: DistillOptions, hooks: Hooks
) -> FitReport:
    options.check()
    if isinstance(teacher, Artifact):
        teacher = Teacher(teacher, data, also=sorted(set(options.hints.values())), live="augment" in hooks)
    loss = DistillationLoss(model.artifact, teacher, data.labels, options)
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
    """Of an output over samples, all elements together; a constant output has its square, and zeros have 1."""
    spread = float(answer.astype(np.float64).var(axis=0).mean())
    square = float((answer.astype(np.float64) ** 2).mean())
    return spread if spread > 1e-9 * square else square or 1.0


def _softmax_inputs(artifact: Artifact) -> dict[str, str]:
    """The input of each Softmax over the last axis whose result is a graph output."""
    graph = read_proto(artifact).graph
    return {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Softmax" and all(a.i == -1 for a in node.attribute if a.name == "axis")
    }


def check_signatures(ours: Signature, theirs: Signature) -> None:
    """Raise InvalidArgument, which says how they differ, if a student of ``ours`` cannot learn from a teacher of ``theirs``."""
    for what in ("inputs", "outputs"):
        given = {spec.name: spec for spec in getattr(ours, what)}
        wanted = {spec.name: spec for spec in getattr(theirs, what)}
        if given.keys() != wanted.keys():
            raise InvalidArgument(
                f"student and teacher differ: {what} {sorted(given)} in the student, {sorted(wanted)} in the teacher",
                "name them alike, or take a student of the teacher's inputs and outputs",
            )
        for name, spec in given.items():
            other = wanted[name]
            fits = len(spec.shape) == len(other.shape) and all(
                -1 in pair or pair[0] == pair[1] for pair in zip(spec.shape, other.shape, strict=True)
            )
            if spec.datatype is not other.datatype or not fits:
                raise InvalidArgument(
                    f"student and teacher differ: '{name}' is {spec.datatype.value} {list(spec.shape)} in the student, "
                    f"{other.datatype.value} {list(other.shape)} in the teacher",
                    "give a student of the teacher's inputs and outputs",
                )
