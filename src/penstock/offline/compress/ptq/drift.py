"""Detect calibration data that differ from the evaluation data, which leads to wrong ranges.

The population stability index (PSI) compares a tensor's histograms on both data sets, with ten bins that each hold a tenth of the
calibration values: PSI = Σ (e - c)·ln(e / c), where c and e are a bin's fractions of calibration and evaluation values. By convention,
a PSI of 0.1 indicates a change, and a PSI of 0.25 a shift. The expected PSI of two samples from the same population is about
(bins-1)(1/n + 1/m) [Yurdakul, "Statistical Properties of Population Stability Index", 2018]. Values within a sample are not
independent, so n and m count samples. A PSI below ``_NOISE_FACTOR`` times the expected PSI is ignored.
"""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidData, PenstockError
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import LINEAR_OPS, FloatModel, float_model
from penstock.offline.compress.ptq.ranges.histogram import BINS, Histogram
from penstock.tensor import Array

_SHIFT = 0.25
_NOISE_FACTOR = 3.0
"""A tensor is reported only if its PSI exceeds the expected PSI of equal populations by this factor."""
_TENTHS = 10
_ROWS, _BYTES = 512, 64 << 20
"""Maximum number of samples to compare from each data set, and their maximum size in bytes."""
_BEYOND = 0.001
"""A tensor is reported if at least this fraction of its values is beyond the calibrated extremes, and there are enough samples."""
_PSEUDO_COUNT = 0.5
"""Number of samples added to each bin, so that an empty bin has a finite logarithm."""


class Drift(msgspec.Struct, frozen=True):
    """The drift of one tensor between calibration and evaluation data."""

    tensor: str
    psi: float
    """Population stability index, with natural logarithms."""
    threshold: float
    """The PSI above which the difference is significant for these numbers of samples."""
    calibration_median: float
    evaluation_median: float
    beyond: float
    """Fraction of evaluation values beyond the calibration extremes. The extremes are accurate to 1/2048 of the histogram's range."""
    bearable: float = _BEYOND
    """The maximum of ``beyond`` that can occur by chance with this number of samples."""

    @property
    def is_shifted(self) -> bool:
        return self.psi > self.threshold or self.beyond > self.bearable

    @property
    def text(self) -> str:
        """The measured differences as a sentence."""
        parts = []
        if self.psi > self.threshold:
            parts.append(
                f"its values are distributed differently (PSI {self.psi:.2f}, above {self.threshold:.2f}): "
                f"the median is {self.calibration_median:.3g} in calibration and {self.evaluation_median:.3g} in evaluation"
            )
        if self.beyond > self.bearable:
            parts.append(f"{self.beyond:.1%} of its evaluation values are beyond the extremes seen in calibration")
        return f"tensor '{self.tensor}': {'; '.join(parts) or f'alike (PSI {self.psi:.2f})'}"


def find_drift(artifact: Artifact, calibration: Dataset, evaluation: Dataset) -> list[Drift]:
    """The drift of every FP32 input and first-layer result of ``artifact``, in the model's order.

    Raises the errors of ``collect``, and InvalidData if there is no such tensor, as in a model without FP32 tensors.
    """
    model = float_model(artifact)
    tensors = [name for name in model.input_names if model.is_float(name)] + _first_layer(model)
    if not tensors:
        raise InvalidData("the model has no FP32 input or first layer on which to compare the data")
    before, after = (collect(artifact, data, list(dict.fromkeys(tensors))) for data in (calibration, evaluation))
    counts = calibration.count, evaluation.count
    return [compare_histograms(name, before[name].histogram, after[name].histogram, counts) for name in before]


def compare_histograms(tensor: str, calibration: Histogram, evaluation: Histogram, samples: tuple[int, int]) -> Drift:
    """The drift between two histograms; ``samples`` are their sample counts. Raises InvalidData if a histogram is empty."""
    if not (calibration.count and evaluation.count):
        raise InvalidData(f"tensor '{tensor}' is empty and cannot be compared")
    exponent = max(calibration.exponent, evaluation.exponent)
    old, new = _shares(calibration, exponent), _shares(evaluation, exponent)
    tenth = np.floor(_TENTHS * (np.cumsum(old) - old / 2)).clip(0, _TENTHS - 1).astype(np.intp)
    # A bin of the histogram belongs to the tenth that contains its middle. Often more than a tenth of the values are zero.
    groups = np.unique(tenth, return_inverse=True)[1]
    bins = int(groups.max()) + 1
    shares = []
    for part, count in ((old, samples[0]), (new, samples[1])):
        mass = np.bincount(groups, part, bins) * count + _PSEUDO_COUNT
        shares.append(mass / mass.sum())
    psi = float(((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum())
    expected = (bins - 1) * (1 / samples[0] + 1 / samples[1])
    filled = np.flatnonzero(old)
    return Drift(
        tensor,
        psi,
        max(_SHIFT, _NOISE_FACTOR * expected),
        _median(old, exponent),
        _median(new, exponent),
        float(new[: filled[0]].sum() + new[filled[-1] + 1 :].sum()),
        # The next value from a population is beyond n other values with probability 2 / (n + 1).
        max(_BEYOND, _NOISE_FACTOR * 2 / (samples[0] + 1)),
    )


def shift_warnings(found: list[Drift]) -> list[str]:
    """Warnings about shifted tensors; empty if the data are similar."""
    return [f"the calibration data differ from the evaluation data: {one.text}" for one in found if one.is_shifted]


def about(
    artifact: Artifact, fitted: Dataset | None, judged: Dataset, multiple: int = 1, most: float = _ROWS
) -> tuple[str, ...]:
    """Warnings, to show before a build, if the ``judged`` samples differ from the ``fitted`` samples.

    ``artifact`` is the FP32 model, with batches of a multiple of ``multiple``. At most ``most`` samples of each are compared. No
    warnings if the model does not run on the data.
    """
    if fitted is None or fitted.digest == judged.digest:
        return ()
    with contextlib.suppress(PenstockError):
        return tuple(shift_warnings(find_drift(artifact, *(_some(data, multiple, most) for data in (fitted, judged)))))
    return ()


def _first_layer(model: FloatModel) -> list[str]:
    """The outputs of the linear operators that no other linear operator precedes."""
    reached = set(model.input_names)
    found = []
    for node in model.nodes:
        if reached.isdisjoint(node.input):
            continue
        if node.op_type in LINEAR_OPS:
            found += [name for name in node.output if model.is_float(name)]
        else:
            reached.update(node.output)
    return found


def _shares(histogram: Histogram, exponent: int) -> Array:
    """The fractions of the values in the 4096 bins for R = 2^exponent, with the fraction of exact zeros between the negative and
    positive bins. The shape is (4097,).
    """
    return np.insert(histogram.counts_for(exponent).astype(np.float64), BINS, histogram.zeros) / histogram.count


def _median(shares: Array, exponent: int) -> float:
    middles = np.insert((np.arange(-BINS, BINS) + 0.5) * (2.0**exponent / BINS), BINS, 0.0)
    return float(middles[np.searchsorted(np.cumsum(shares), 0.5)])


def _some(data: Dataset, multiple: int, most: float) -> Dataset:
    return data.few(int(min(_ROWS, most, _BYTES / max(1.0, data.sample_bytes))), multiple)
