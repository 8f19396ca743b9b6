"""Quantisation-aware training: train the INT8 graph, starting from post-training quantisation.

The teacher is the float model, so no labels are needed. Training changes only integers and scales of the graph.
"""

from __future__ import annotations

from typing import Annotated, Any, Unpack

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.offline.compress.options import NotNegative, Options
from penstock.offline.compress.ptq.qdq_placement import FloatModel
from penstock.offline.compress.taps import no_progress
from penstock.offline.compress.training.batches import TrainingBatches
from penstock.offline.compress.training.distill import DistillationLoss, DistillOptions, recover
from penstock.offline.compress.training.fake_quantize import FakeQuantization
from penstock.offline.compress.training.fit import reproducible
from penstock.offline.compress.training.options import FitOptions, Hooks
from penstock.offline.compress.training.teacher import Teacher
from penstock.offline.compress.training.torch import torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.judge.accuracy import answers_of
from penstock.offline.optimize.mapped import array_of
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.names import varying_outputs
from penstock.tensor import Array

_STEPS = 255
"""Number of steps between the smallest and the largest value of an 8-bit integer."""


class QatOptions(Options, frozen=True):
    """Options of quantisation-aware training."""

    fit: FitOptions = FitOptions(learning_rate=5e-4, held_out=0.2)
    scale_rate: NotNegative = 100.0
    """Learning rate of the logarithms of scales, as a multiple of the learning rate of weights."""
    frozen_after: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.8
    """Fraction of the steps after which scales are fixed. Weights continue to train."""


def train_quantized(
    quantized: Artifact,
    original: Artifact,
    data: Dataset,
    options: QatOptions | None = None,
    *,
    teacher: Artifact | Teacher | None = None,
    **hooks: Unpack[Hooks],
) -> Artifact:
    """Train the integers and scales of ``quantized`` to reproduce ``teacher``, by default the float model ``original``.

    Graph, types and zero points stay the same. The parameters with the best result on held-out rows are kept. If the trained model is
    not better than ``quantized`` on these rows in ONNX Runtime, the result is ``quantized``, unchanged, and the provenance step has
    ``kept`` = "start". Raises Unsupported if there are no integer weights, and the errors of ``recover``.
    """
    options = options or QatOptions()
    options.check()
    floats = {name: array_of(tensor) for name, tensor in FloatModel(original).weights.items()}
    model = TrainableModel(quantized)
    fake = FakeQuantization(model, floats, data, options.scale_rate)
    if not isinstance(teacher, Teacher):
        teacher = Teacher(teacher or original, data, live="augment" in hooks)

    def before_step(step: int, steps: int) -> None:
        fake.freeze_scales(step >= options.frozen_after * steps)
        hooks.get("before_step", no_progress)(step, steps)

    own: dict[str, Any] = {
        "parameters": fake.parameters,
        "before_step": before_step,
        "depends_on": f"{hooks.get('depends_on', '')} {original.digest} {options}",
    }
    report = recover(model, data, teacher, options.fit, **{**hooks, **own})
    facts: dict[str, Any] = {**report.facts(), "masters_from_floats": fake.from_floats, "teacher": teacher.digest}
    plain = msgspec.to_builtins(options)
    with reproducible(options.fit.threads):
        trained = model.to_artifact("qat", plain, facts)
        _, held = TrainingBatches(model, data).split(options.fit.held_out, options.fit.seed)
        rows = held if len(held) else np.arange(data.count)
        before, after = (_loss(artifact, data, teacher, rows, options.fit) for artifact in (quantized, trained))
        agreed = agreement(model, trained, data)
    better = after < before
    facts |= {
        "kept": "trained" if better else "start",
        "held_out_loss": [round(before, 6), round(after, 6)],
        "agreement": agreed,
    }
    return quantized.derive(trained if better else quantized, "qat", plain, facts)


def agreement(
    model: TrainableModel, artifact: Artifact, data: Dataset, *, as_written: bool = False
) -> dict[str, float]:
    """Compare the outputs of ``model`` with those of ``artifact`` in ONNX Runtime. ``as_written`` disables graph optimisation.

    Differences are in steps: the scale of a quantised output, or 1/255 of the range of a float output. ``within_one_step`` is the
    fraction of samples for which no output differs by more than one step. ``largest`` is the largest difference.
    """
    varying = varying_outputs(read_proto(model.artifact).graph)
    theirs = {
        name: array for name, array in answers_of(artifact, data, as_written=as_written).items() if name in varying
    }
    batches = TrainingBatches(model, data)
    with torch.no_grad():
        pieces = [batches.forward(batches.inputs(rows)) for rows in batches.pieces(np.arange(data.count), 64)]
        steps = _output_steps(model)
    worst = np.zeros(data.count)
    for name, array in theirs.items():
        ours = np.concatenate([piece[name].numpy() for piece in pieces]).astype(np.float64)
        step = steps.get(name) or float(np.ptp(array)) / _STEPS or 1.0
        difference = np.abs(ours - array).reshape(data.count, -1).max(axis=1, initial=0.0)
        worst = np.maximum(worst, difference / step)
    # Allow for the rounding of floats that are one step apart.
    within = float((worst <= 1 + 1e-3).mean())
    return {"within_one_step": round(within, 4), "largest": round(float(worst.max()), 3)}


def _output_steps(model: TrainableModel) -> dict[str, float]:
    graph = read_proto(model.artifact).graph
    outputs = set(model.output_names)
    return {
        node.output[0]: float(model.constant(node.input[1]).max())
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.output[0] in outputs
    }


def _loss(artifact: Artifact, data: Dataset, teacher: Teacher, rows: Array, options: FitOptions) -> float:
    """The loss of ``artifact`` in ONNX Runtime on ``rows``."""
    inputs = data.take(rows)
    loss = DistillationLoss(artifact, teacher, data.classes, DistillOptions(fit=options))
    tensors = {**inputs, **answers_of(artifact, make_dataset(inputs, None))}
    return float(loss({name: torch.tensor(array) for name, array in tensors.items()}, torch.from_numpy(rows)))
