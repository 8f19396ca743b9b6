"""The effect of a change of arithmetic on a model's answers, as one number that needs no labels."""

from __future__ import annotations

import numpy as np

from penstock.offline.judge.metrics import Outputs, sample_errors
from penstock.tensor import Array

_FEWEST_CLASSES = 3
"""Two scores less their mean have no angle but 0 and 180°."""


def output_harm(reference: Outputs, outputs: Outputs) -> float:
    """The change of the answers by rounding, 0 for none: the mean over samples, each by its worst output.

    Of class scores, [samples, three classes or more], 1 - cosine between the scores less their means, which is what their
    order depends on; if an output is anything else, the relative error, at most 1.
    """
    if any(array.ndim != 2 or array.shape[1] < _FEWEST_CLASSES for array in reference.values()):
        return float(sample_errors(reference, outputs).mean())
    turned = [1 - _cosine(_centred(array), _centred(outputs[name])) for name, array in reference.items()]
    return float(np.max(turned, axis=0).mean())


def _centred(scores: Array) -> Array:
    return np.asarray(scores.astype(np.float64) - scores.mean(axis=1, keepdims=True, dtype=np.float64))


def _cosine(one: Array, other: Array) -> Array:
    """Between rows; 0 if one of them is zero or not finite."""
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num((one * other).sum(axis=1) / norms, nan=0.0, posinf=0.0, neginf=0.0))
