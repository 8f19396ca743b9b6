"""Metrics of numbers: fidelity, mean absolute and root mean square error, R², correlation."""

from __future__ import annotations

import numpy as np

from penstock.errors import InvalidData
from penstock.offline.judge.metric import AccuracyMetric, itself
from penstock.offline.judge.metrics import deviations
from penstock.offline.judge.scoring.classes import is_float, is_ids
from penstock.tensor import Array


def fidelity(output: Array, truth: Array) -> Array:
    """1 minus each row's difference from the original's row, relative to the spread of the original's rows; at least 0.

    Output: any shape. The spread of a column is measured from its mean, so an output that hardly varies must be precise; see
    ``metrics.deviations``.
    """
    return np.asarray(1 - deviations(truth, output).clip(max=1.0))


def mae(output: Array, truth: Array) -> float:
    """The mean absolute error. Output and labels: the same shape."""
    return float(np.abs(_difference(output, truth)).mean())


def rmse(output: Array, truth: Array) -> float:
    """The root of the mean square error. Output and labels: the same shape."""
    return float(np.sqrt((_difference(output, truth) ** 2).mean()))


def r2(output: Array, truth: Array) -> float:
    """The coefficient of determination, averaged over the columns that vary (``r2_score`` of scikit-learn).

    Output and labels, or the original's output: the same shape.
    """
    want = _columns(truth)
    spread = ((want - want.mean(axis=0)) ** 2).sum(axis=0)
    error = (_difference(output, truth) ** 2).sum(axis=0)
    return float((1 - error[_varying(spread)] / spread[_varying(spread)]).mean())


def correlation(output: Array, truth: Array) -> float:
    """Pearson's correlation, averaged over the columns whose truth varies. A constant column of the output has correlation 0.

    Output and labels, or the original's output: the same shape.
    """
    got, want = _columns(output), _columns(truth)
    got, want = got - got.mean(axis=0), want - want.mean(axis=0)
    varying = _varying((want**2).sum(axis=0))
    got, want = got[:, varying], want[:, varying]
    size = np.sqrt((got**2).sum(axis=0) * (want**2).sum(axis=0))
    return float(np.where(size > 0, (got * want).sum(axis=0) / np.where(size > 0, size, 1), 0.0).mean())


def _columns(array: Array) -> Array:
    return array.reshape(len(array), -1).astype(np.float64)


def _difference(output: Array, truth: Array) -> Array:
    return np.asarray(_columns(output) - _columns(truth))


def _varying(spread: Array) -> Array:
    if not (spread > 0).any():
        raise InvalidData("the truth is the same for every sample, so the metric is not defined", "use the metric mae")
    return np.asarray(spread > 0)


def same_size(output: Array, labels: Array | None) -> bool:
    """True if the output has numbers, and there are as many labels as numbers."""
    if not is_float(output) and not is_ids(output):
        return False
    return labels is None or (labels.dtype.kind in "iufb" and labels.size == output.size)


def _labelled(output: Array, labels: Array | None) -> bool:
    return labels is not None and same_size(output, labels)


_SAME = "numbers [samples, …]; labels: numbers of the same shape"

METRICS = (
    AccuracyMetric(
        "fidelity",
        fidelity,
        "any; no labels",
        lambda *_: True,
        truth=itself,
        labels=False,
        span=(0.0, 1.0),
        alone=False,
        kind="numbers",
    ),
    AccuracyMetric("mae", mae, _SAME, _labelled, higher=False, relative=True, kind="numbers"),
    AccuracyMetric("rmse", rmse, _SAME, _labelled, higher=False, relative=True, kind="numbers"),
    AccuracyMetric("r2", r2, _SAME, same_size, truth=itself, kind="numbers"),
    AccuracyMetric("correlation", correlation, _SAME, same_size, truth=itself, kind="numbers"),
)
