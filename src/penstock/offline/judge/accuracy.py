"""Accuracy of a candidate against the original model, paired sample by sample.

With labels the metric is top-1. Without, it is agreement of the arg-max with the original's where all outputs look
like class scores ([samples, classes], at least two classes), and fidelity, 1 - mean relative error, everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from penstock.bundle.evidence import Accuracy, Interval
from penstock.engines.base import LoadedModel
from penstock.errors import InvalidArgument, InvalidData, PenstockError, Unsupported
from penstock.offline.dataset import Dataset
from penstock.tensor import Array, DataType

Outputs = dict[str, Array]

_Z95 = 1.959964
_TINY, _HUGE = 1e-150, 1e150
"""Bounds of sums of squares, so that their quotients and totals are numbers."""
_NEGLIGIBLE = 1e-6
"""An element this small is as good as zero."""
_WORST = 1e6
"""A relative error beyond this says no more than this."""


class Judge(msgspec.Struct, frozen=True):
    """Holds the original's answers on the evaluation data; compares others with them."""

    metric: Literal["top-1", "agreement", "fidelity"]
    output: str
    """The output that top-1 reads; all outputs count for agreement, fidelity and relative error."""
    reference: Outputs
    labels: Array | None

    def compare(self, outputs: Outputs) -> Accuracy:
        """The accuracy of a candidate that answered ``outputs`` on the same samples. Raises PenstockError if shapes differ."""
        for name, array in self.reference.items():
            if outputs[name].shape != array.shape:
                raise PenstockError(
                    f"output '{name}' has shape {list(outputs[name].shape)}, the original's {list(array.shape)}"
                )
        samples = len(self.reference[self.output])
        errors = output_errors(self.reference, outputs)
        error = max(errors.values())
        if self.metric == "fidelity":
            loss = _mean_interval(sample_errors(self.reference, outputs))
            return Accuracy(self.metric, 1 - loss.value, loss, error, samples)
        before, after = self.scores(self.reference), self.scores(outputs)
        # What a label judges may differ as it likes; of the rest, the worst is held against the contract.
        unjudged = {name: e for name, e in errors.items() if self.labels is None or name != self.output}
        worst = max(unjudged, key=lambda name: unjudged[name], default="")
        loss = paired_interval(before, after)
        return Accuracy(self.metric, float(after.mean()), loss, error, samples, worst, unjudged.get(worst, 0.0))

    def scores(self, outputs: Outputs) -> Array:
        """How good ``outputs`` are, sample by sample: right or not as booleans, or for fidelity 1 - relative error as floats."""
        if self.metric == "fidelity":
            return np.asarray(1 - sample_errors(self.reference, outputs))
        if self.labels is not None:
            return _hits(outputs[self.output], self.labels)
        hits = [_hits(outputs[name], array.argmax(axis=1)) for name, array in self.reference.items()]
        return np.asarray(np.logical_and.reduce(hits))

    def interval(self, differences: Array) -> Interval:
        """The mean of differences of ``scores`` with its 95 % interval: of hits ``paired_interval``'s, also for halves of samples."""
        if self.metric == "fidelity":
            return mean_interval(differences)
        differences = differences.astype(np.float64)
        return _matched_pairs(len(differences), float(differences.sum()), float(differences @ differences))

    def original(self) -> Accuracy:
        """The original's own accuracy, which loses nothing by definition."""
        return msgspec.structs.replace(self.compare(self.reference), loss=Interval(0.0, 0.0, 0.0))


def make_judge(reference: Outputs, labels: Array | None) -> Judge:
    """Choose the metric from the shape of the original's outputs. Raises InvalidData if labels fit no output."""
    scores = [name for name, array in reference.items() if array.ndim == 2 and array.shape[1] >= 2 and _is_float(array)]
    if labels is None:
        if len(scores) == len(reference):
            return Judge("agreement", scores[0], reference, None)
        return Judge("fidelity", next(iter(reference)), reference, None)
    for name in scores:
        if labels.max() < reference[name].shape[1]:
            return Judge("top-1", name, reference, labels)
    shapes = {name: list(array.shape) for name, array in reference.items()}
    raise InvalidData(
        f"labels go up to {labels.max()}, but no output is [samples, more classes than that]: outputs are {shapes}",
        "check that labels are class numbers from 0, or leave them out",
    )


def answers(model: LoadedModel, data: Dataset, batch: int = 64) -> Outputs:
    """The outputs of ``model`` on all of ``data``, one row per sample, in chunks of ``batch`` rows or of its fixed batch.

    Raises Unsupported if the outputs have no axis for samples, or differ in shape from one call to the next.
    """
    size = batch if model.signature.batchable else model.signature.smallest_batch
    parts: dict[str, list[Array]] = {name: [] for name in model.signature.output_names}
    for start in range(0, data.count, size):
        rows = data.rows(start, start + size)
        count = min(size, data.count - start)
        for name, array in model.forward(rows).items():
            # A model for one sample may answer without an axis for it.
            parts[name].append(array if array.shape[:1] == (count,) else _one_row(name, array, count))
    for name, arrays in parts.items():
        if len({array.shape[1:] for array in arrays}) > 1:
            raise Unsupported(
                f"output '{name}' differs in shape from sample to sample, so that it cannot be compared",
                "export the model with outputs of fixed shape",
            )
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def paired_interval(before: Array, after: Array) -> Interval:
    """Mean of ``before - after`` (booleans per sample) with the adjusted Wald interval of Agresti and Min (2005) for
    matched pairs, which stays honest when no pair differs."""
    lost, won = float((before & ~after).sum()), float((~before & after).sum())
    return _matched_pairs(len(before), lost - won, lost + won)


def samples_needed(max_loss: float, loss: float = 0.0, changed: float = 0.02) -> int | None:
    """How many samples prove a loss within ``max_loss`` at 95 % confidence, by the upper bound of ``paired_interval``.

    ``loss`` is the true loss, and ``changed`` the share of samples that are right in one model only; it is at least the size of
    the loss. All are shares. None if no number of samples does: the loss is not below what is allowed.
    """
    if not 0 < max_loss <= 1 or not -1 <= loss <= 1 or not 0 <= changed <= 1:
        raise InvalidArgument(
            f"a loss of {loss}, of {max_loss} allowed, with {changed} of the samples changed, is not possible",
            "give shares: 0.01 for one point",
        )
    if loss >= max_loss:
        return None
    changed = max(changed, abs(loss))

    def proves(count: int) -> bool:
        return _matched_pairs(count, count * loss, count * changed).high <= max_loss

    few, enough = 0, 1
    while not proves(enough):
        few, enough = enough, 2 * enough
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if proves(middle) else (middle, enough)
    return enough


def _matched_pairs(count: int, total: float, squares: float) -> Interval:
    """Of ``count`` differences with that sum and sum of squares; half a sample lost and half a one won are added."""
    n = count + 2.0
    centre, spread = total / n, _Z95 * (squares + 1 - total**2 / n) ** 0.5 / n
    return Interval(total / count, centre - spread, centre + spread)


def mean_interval(values: Array) -> Interval:
    """The mean of ``values`` with its normal 95 % interval; of one value one that says nothing: a report can hold no infinity."""
    values = values.astype(np.float64)
    spread = _Z95 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else _WORST
    mean, spread = float(values.mean()), min(spread, _WORST)
    return Interval(mean, mean - spread, mean + spread)


def sample_errors(reference: Mapping[str, Array], outputs: Mapping[str, Array]) -> Array:
    """Relative error of each sample, of its worst output: norm of the difference by norm of the reference, at most 1.

    A sample with NaN or infinity that the reference does not have in the same place has error 1. A norm counts as at least
    a hundredth of the output's mean, so that a sample whose reference is nearly zero is not all error.
    """
    errors = []
    for name, want in reference.items():
        difference, norm = _squares(want, outputs[name])
        errors.append(np.sqrt(difference / np.maximum(norm, 1e-4 * norm.mean())))
    return np.asarray(np.max(errors, axis=0).clip(max=1.0))


def output_errors(reference: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, float]:
    """Relative error of each output over all samples; finite always, since a manifest can hold no other number."""
    errors = {}
    for name, want in reference.items():
        difference, norm = _squares(want, outputs[name])
        errors[name] = min(float(np.sqrt(difference.sum() / norm.sum())), _WORST)
    return errors


def _hits(scores: Array, target: Array) -> Array:
    """Whether the class of highest score is ``target``, per sample; a sample with NaN is a miss."""
    return np.asarray((scores.argmax(axis=1) == target) & ~np.isnan(scores).any(axis=1))


def _one_row(name: str, array: Array, count: int) -> Array:
    if count == 1:
        return array[np.newaxis]
    raise Unsupported(
        f"output '{name}' has shape {list(array.shape)} for {count} samples: its first axis does not count them",
        "export the model with a batch axis on every output",
    )


def _is_float(array: Array) -> bool:
    return DataType.from_numpy(array.dtype).is_float


def _squares(want: Array, got: Array) -> tuple[Array, Array]:
    """Per sample, the sum of squared differences and the sum of squares of the reference; text differs by 0 or 1.

    Where NaN and infinities are the same they count as no difference; a sample in which they are not differs by its norm.
    """
    rows, got = want.reshape(len(want), -1), got.reshape(len(want), -1)
    if want.dtype.kind in "OSU":
        return (got != rows).sum(axis=1).astype(np.float64), np.full(len(rows), float(max(1, rows.shape[1])))
    rows, got = rows.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(got) & np.isfinite(rows)
    same = (got == rows) | (np.isnan(got) & np.isnan(rows))
    broken = (~finite & ~same).any(axis=1)
    with np.errstate(over="ignore"):
        difference = (np.subtract(got, rows, out=np.zeros_like(rows), where=finite) ** 2).sum(axis=1)
        norm = (np.where(np.isfinite(rows), rows, 0) ** 2).sum(axis=1)
    # Rounding beside a reference of zeros is no error.
    norm = np.clip(norm, max(_TINY, _NEGLIGIBLE**2 * rows.shape[1]), _HUGE)
    return np.where(broken, np.maximum(difference, norm), difference).clip(max=_HUGE), norm


def _mean_interval(values: Array) -> Interval:
    mean = float(values.mean())
    spread = _Z95 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Interval(mean, max(0.0, mean - spread), mean + spread)
