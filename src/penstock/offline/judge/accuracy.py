"""Accuracy of a candidate relative to the original model, compared sample by sample.

With labels, the metric is top-1. Without labels, it is agreement of the arg-max with the original's if all outputs look like class
scores ([samples, classes], at least two classes). Otherwise it is fidelity: 1 - mean relative error.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy
from penstock.dataset import Dataset
from penstock.engines.base import LoadedModel
from penstock.errors import InvalidData, PenstockError, Unsupported
from penstock.measurement import Interval
from penstock.offline.judge.metrics import (
    Outputs,
    error_interval,
    matched_pairs,
    mean_interval,
    output_errors,
    paired_interval,
    sample_errors,
    share_divergence,
)
from penstock.offline.sessions import loaded
from penstock.tensor import Array, DataType


class Reference(msgspec.Struct, frozen=True):
    """The original's outputs on the evaluation data, and the metric that compares other outputs with them."""

    metric: Literal["top-1", "agreement", "fidelity"]
    output: str
    """The output that top-1 uses. Agreement, fidelity and relative error use all outputs."""
    answers: Outputs
    labels: Array | None

    @property
    def proxy(self) -> str:
        """Name of the measure that ``divergence`` returns."""
        return "relative error" if self.metric == "fidelity" else "KL divergence"

    def compare(self, outputs: Outputs) -> Accuracy:
        """The accuracy of a candidate with these ``outputs`` for the same samples. Raises PenstockError if shapes differ."""
        for name, array in self.answers.items():
            if outputs[name].shape != array.shape:
                raise PenstockError(
                    f"output '{name}' has shape {list(outputs[name].shape)}, the original's {list(array.shape)}"
                )
        samples = len(self.answers[self.output])
        errors = output_errors(self.answers, outputs)
        error = max(errors.values())
        if self.metric == "fidelity":
            loss = error_interval(sample_errors(self.answers, outputs))
            return Accuracy(self.metric, 1 - loss.value, loss, error, samples)
        before, after = self.scores(self.answers), self.scores(outputs)
        # An output with labels may differ from the original's. The contract checks the worst of the other outputs.
        unjudged = {name: e for name, e in errors.items() if self.labels is None or name != self.output}
        worst = max(unjudged, key=lambda name: unjudged[name], default="")
        loss = paired_interval(before, after)
        return Accuracy(self.metric, float(after.mean()), loss, error, samples, worst, unjudged.get(worst, 0.0))

    def scores(self, outputs: Outputs) -> Array:
        """A score for each sample: True if the class is right; for fidelity, 1 - relative error."""
        if self.metric == "fidelity":
            return np.asarray(1 - sample_errors(self.answers, outputs))
        if self.labels is not None:
            return _hits(outputs[self.output], self.labels)
        hits = [_hits(outputs[name], array.argmax(axis=1)) for name, array in self.answers.items()]
        return np.asarray(np.logical_and.reduce(hits))

    def divergence(self, outputs: Outputs) -> Array:
        """The distance of ``outputs`` from the original's, per sample, float32. Unlike accuracy, it is continuous.

        The distance is the KL divergence, summed over the judged outputs with class scores. For fidelity, it is the relative error.
        """
        if self.metric == "fidelity":
            return np.asarray(sample_errors(self.answers, outputs), np.float32)
        judged = [self.output] if self.labels is not None else list(self.answers)
        total = np.sum([share_divergence(self.answers[name], outputs[name]) for name in judged], axis=0)
        return np.asarray(total.clip(min=0.0).astype(np.float32))

    def interval(self, differences: Array) -> Interval:
        """The mean of differences of ``scores`` with its 95 % interval. For hits, it is the interval of ``paired_interval``."""
        if self.metric == "fidelity":
            return mean_interval(differences)
        differences = differences.astype(np.float64)
        return matched_pairs(len(differences), float(differences.sum()), float(differences @ differences))

    def original(self) -> Accuracy:
        """The original's own accuracy; its loss is 0 by definition."""
        return msgspec.structs.replace(self.compare(self.answers), loss=Interval(0.0, 0.0, 0.0))


def make_reference(answers: Outputs, labels: Array | None) -> Reference:
    """Choose the metric from the shape of the original's outputs. Raises InvalidData if labels fit no output."""
    scores = [name for name, array in answers.items() if array.ndim == 2 and array.shape[1] >= 2 and _is_float(array)]
    if labels is None:
        if len(scores) == len(answers):
            return Reference("agreement", scores[0], answers, None)
        return Reference("fidelity", next(iter(answers)), answers, None)
    for name in scores:
        if labels.max() < answers[name].shape[1]:
            return Reference("top-1", name, answers, labels)
    shapes = {name: list(array.shape) for name, array in answers.items()}
    raise InvalidData(
        f"labels go up to {labels.max()}, but no output has the shape [samples, classes] with more classes: outputs are {shapes}",
        "check that labels are class numbers that start at 0, or remove them",
    )


def answers(model: LoadedModel, data: Dataset, batch: int = 64) -> Outputs:
    """The outputs of ``model`` on all of ``data``, one row per sample. Calls have ``batch`` rows, or the model's fixed batch size.

    Raises Unsupported if the outputs have no axis for samples, or differ in shape from one call to the next.
    """
    size = batch if model.signature.batchable else model.signature.smallest_batch
    parts: dict[str, list[Array]] = {name: [] for name in model.signature.output_names}
    for start in range(0, data.count, size):
        rows = data.rows(start, start + size)
        count = min(size, data.count - start)
        for name, array in model.forward(rows).items():
            # A model for one sample may have outputs without an axis for samples.
            parts[name].append(array if array.shape[:1] == (count,) else _one_row(name, array, count))
    for name, arrays in parts.items():
        if len({array.shape[1:] for array in arrays}) > 1:
            raise Unsupported(
                f"output '{name}' cannot be compared, because its shape differs from sample to sample",
                "export the model with outputs of fixed shape",
            )
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def answers_of(
    artifact: Artifact, data: Dataset, threads: int = 1, *, batch_size: int = 64, as_written: bool = False
) -> Outputs:
    """The outputs of ``artifact`` on all of ``data``. Raises the errors of ``answers`` and ``loaded``."""
    with loaded(artifact, threads, as_written=as_written) as model:
        return answers(model, data, batch_size)


def _hits(scores: Array, target: Array) -> Array:
    """For each sample, True if the class with the highest score is ``target``. A sample with NaN is a miss."""
    return np.asarray((scores.argmax(axis=1) == target) & ~np.isnan(scores).any(axis=1))


def _one_row(name: str, array: Array, count: int) -> Array:
    if count == 1:
        return array[np.newaxis]
    raise Unsupported(
        f"output '{name}' has shape {list(array.shape)} for {count} samples: its first axis is not the number of samples",
        "export the model with a batch axis on every output",
    )


def _is_float(array: Array) -> bool:
    return DataType.from_numpy(array.dtype).is_float
