"""Metrics of embeddings: cosine and rank agreement."""

from __future__ import annotations

import numpy as np

from penstock.offline.judge.metric import AccuracyMetric, itself
from penstock.offline.judge.scoring.numbers import same_size
from penstock.tensor import Array

_ANCHORS = 512
"""Maximum number of samples with which each sample is compared."""


def cosine(output: Array, truth: Array) -> Array:
    """The cosine of the angle between each row and its truth; 0 for a row of zeros.

    Output and labels, or the original's output: embeddings [samples, …] of the same shape.
    """
    got, want = _unit(output), _unit(truth)
    return np.asarray((got * want).sum(axis=1).clip(-1, 1))


def rank(output: Array, truth: Array) -> float:
    """Spearman's rank correlation between a sample's similarities to other samples in the output and in the truth, averaged over the
    samples.

    The result is 1 if a search finds the same samples in the same order. Output and labels, or the original's output: embeddings
    [samples, …]. Similarities are cosines to at most 512 evenly spaced samples.
    """
    rows = np.unique(np.linspace(0, len(output) - 1, _ANCHORS).astype(np.intp))
    got, want = (_ranks(unit @ unit[rows].T) for unit in (_unit(output), _unit(truth)))
    size = np.sqrt((got**2).sum(axis=1) * (want**2).sum(axis=1))
    same = np.where(size > 0, (got * want).sum(axis=1) / np.where(size > 0, size, 1), 0.0)
    return float(same.mean()) if len(rows) > 1 else 1.0


def _unit(array: Array) -> Array:
    rows = array.reshape(len(array), -1).astype(np.float64)
    size = np.sqrt((rows**2).sum(axis=1, keepdims=True))
    return np.asarray(rows / np.where(size > 0, size, 1))


def _ranks(values: Array) -> Array:
    """The ranks in each row, less their mean. Ties are broken by position."""
    ranks = values.argsort(axis=1, kind="stable").argsort(axis=1).astype(np.float64)
    return np.asarray(ranks - ranks.mean(axis=1, keepdims=True))


def _embeds(output: Array, labels: Array | None) -> bool:
    return same_size(output, labels) and output.ndim >= 2 and output.size >= 2 * len(output)


_SHAPES = "embeddings [samples, …]; labels: embeddings of the same shape"

METRICS = (
    AccuracyMetric("cosine", cosine, _SHAPES, _embeds, truth=itself, span=(-1.0, 1.0), kind="numbers"),
    AccuracyMetric("rank", rank, _SHAPES, _embeds, truth=itself, kind="numbers"),
)
