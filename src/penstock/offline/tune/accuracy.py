"""Accuracy of a candidate against the original model, paired sample by sample.

With labels the metric is top-1. Without, it is agreement of the arg-max with the original's where the output looks
like class scores ([samples, classes], at least two classes), and fidelity, 1 - mean relative error, everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from penstock.bundle.evidence import Accuracy, Interval
from penstock.engines.base import LoadedModel
from penstock.errors import InvalidData
from penstock.offline.dataset import Dataset
from penstock.tensor import Array

Outputs = dict[str, Array]

_Z95 = 1.959964
_TINY = float(np.finfo(np.float64).tiny)


class Judge(msgspec.Struct, frozen=True):
    """Holds the original's answers on the evaluation data; compares others with them."""

    metric: Literal["top-1", "agreement", "fidelity"]
    output: str
    """The output that the metric reads; all outputs count for fidelity and relative error."""
    reference: Outputs
    labels: Array | None

    def compare(self, outputs: Outputs) -> Accuracy:
        """The accuracy of a candidate that answered ``outputs`` on the same samples."""
        samples = len(self.reference[self.output])
        error = sample_errors(self.reference, outputs)
        if not all(np.isfinite(array).all() for array in outputs.values() if array.dtype.kind == "f"):
            error = np.where(np.isfinite(error), error, 1.0)
        if self.metric == "fidelity":
            loss = _mean_interval(error)
            return Accuracy(self.metric, 1 - loss.value, loss, total_error(self.reference, outputs), samples)
        target = self.labels if self.labels is not None else self.reference[self.output].argmax(axis=1)
        before = self.reference[self.output].argmax(axis=1) == target
        after = outputs[self.output].argmax(axis=1) == target
        loss = paired_interval(before, after)
        return Accuracy(self.metric, float(after.mean()), loss, total_error(self.reference, outputs), samples)


def make_judge(reference: Outputs, labels: Array | None) -> Judge:
    """Choose the metric from the shape of the original's outputs. Raises InvalidData if labels fit no output."""
    scores = [
        name for name, array in reference.items() if array.ndim == 2 and array.shape[1] >= 2 and array.dtype.kind == "f"
    ]
    if labels is None:
        if scores:
            return Judge("agreement", scores[0], reference, None)
        return Judge("fidelity", next(iter(reference)), reference, None)
    labels = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InvalidData(
            f"labels must be one integer class per sample, but have shape {list(labels.shape)} and type {labels.dtype}",
            "leave labels out to be judged by agreement with the original",
        )
    if labels.min() < 0:
        raise InvalidData(f"labels must not be negative, but one is {labels.min()}")
    for name in scores:
        if labels.max() < reference[name].shape[1]:
            return Judge("top-1", name, reference, labels)
    shapes = {name: list(array.shape) for name, array in reference.items()}
    raise InvalidData(
        f"labels go up to {labels.max()}, but no output is [samples, more classes than that]: outputs are {shapes}",
        "check that labels are class numbers from 0, or leave them out",
    )


def answers(model: LoadedModel, data: Dataset, batch: int = 64) -> Outputs:
    """The outputs of ``model`` on all of ``data``, in chunks of ``batch`` rows, or of the model's fixed batch."""
    fixed = [spec.shape[0] for spec in model.signature.inputs if spec.shape]
    size = batch if all(dim == -1 for dim in fixed) else max(1, *fixed)
    parts = [model.forward(data.rows(start, start + size)) for start in range(0, data.count, size)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def paired_interval(before: Array, after: Array) -> Interval:
    """Mean of ``before - after`` (booleans per sample) with the adjusted Wald interval of Agresti and Min (2005) for
    matched pairs, which stays honest when no pair differs."""
    count = len(before)
    lost = float((before & ~after).sum())
    won = float((~before & after).sum())
    n, b, c = count + 2.0, lost + 0.5, won + 0.5
    centre, spread = (b - c) / n, _Z95 * ((b + c) - (b - c) ** 2 / n) ** 0.5 / n
    return Interval((lost - won) / count, centre - spread, centre + spread)


def sample_errors(reference: Mapping[str, Array], outputs: Mapping[str, Array]) -> Array:
    """Relative error of each sample over all outputs: norm of the difference by norm of the reference."""
    difference, norm = _squares(reference, outputs)
    return np.asarray(np.sqrt(difference / np.maximum(norm, _TINY)))


def total_error(reference: Mapping[str, Array], outputs: Mapping[str, Array]) -> float:
    """Relative error over all samples and outputs at once."""
    difference, norm = _squares(reference, outputs)
    return float(np.sqrt(difference.sum() / max(norm.sum(), _TINY)))


def _squares(reference: Mapping[str, Array], outputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """Per sample, the sum of squared differences and the sum of squares of the reference; text differs by 0 or 1."""
    difference: Array = np.zeros(len(next(iter(reference.values()))))
    norm = np.zeros_like(difference)
    for name, want in reference.items():
        got, rows = outputs[name].reshape(len(want), -1), want.reshape(len(want), -1)
        if want.dtype.kind in "OSU":
            difference += (got != rows).sum(axis=1)
            norm += rows.shape[1]
        else:
            difference += ((got.astype(np.float64) - rows.astype(np.float64)) ** 2).sum(axis=1)
            norm += (rows.astype(np.float64) ** 2).sum(axis=1)
    return difference, norm


def _mean_interval(values: Array) -> Interval:
    mean = float(values.mean())
    spread = _Z95 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Interval(mean, max(0.0, mean - spread), mean + spread)
