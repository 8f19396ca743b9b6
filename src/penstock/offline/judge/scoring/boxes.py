"""Metrics of boxes and segments in images: mean average precision, intersection over union."""

from __future__ import annotations

import numpy as np

from penstock.errors import InvalidData
from penstock.offline.judge.metric import AccuracyMetric
from penstock.offline.judge.scoring.classes import is_float, is_ids
from penstock.tensor import Array

_OVERLAPS = np.arange(0.5, 1.0, 0.05) - 1e-9
"""Least overlaps of a match, less the error of rounding."""
_SAMPLES = 16
"""Number of samples that are matched at once."""
_PAIRS = 1 << 20
"""Number of pairs of boxes whose overlaps are computed at once, about, which limits the memory."""


def mean_average_precision(output: Array, truth: Array) -> float:
    """The average precision (AP) of COCO: the area under the precision-recall curve, averaged over classes and over the overlaps 0.50,
    0.55, …, 0.95. Unlike in COCO, all points of the curve count (not 101), and all boxes of a sample (not at most 100).

    Output: boxes [samples, boxes, 6] with left, top, right, bottom, score, class. Truth: labels, or the original's boxes, [samples,
    boxes, 5] without score. In both, boxes with a negative class or without area are padding.
    """
    output, truth = _without_padding(output), _without_padding(truth)
    classes = np.unique(truth[..., 4][truth[..., 4] >= 0])
    if not len(classes):
        raise InvalidData(
            "the labels have no boxes",
            "give left, top, right, bottom and class, with right above left, bottom above top, and classes of at least 0",
        )
    output = np.take_along_axis(output, np.argsort(-output[..., 4:5], axis=1, kind="stable"), axis=1)
    parts = range(0, len(output), _SAMPLES)
    hits = np.concatenate([_matches(output[at : at + _SAMPLES], truth[at : at + _SAMPLES]) for at in parts])

    def precision(number: float) -> float:
        found = output[..., 5] == number
        return _precision(output[found, 4], hits[found], int((truth[..., 4] == number).sum()))

    return float(np.mean([precision(number) for number in classes]))


def iou(output: Array, truth: Array) -> float:
    """The intersection over union (IoU) of each class's positions in output and truth, over all samples; averaged over the classes.

    Output: scores [samples, classes, …] or class numbers [samples, …]. Truth: labels, or the original's classes, as class numbers
    [samples, …]; negative labels are skipped.
    """
    found, truth = segments(output).reshape(-1), truth.reshape(-1)
    found, truth = found[truth >= 0], truth[truth >= 0]
    if not len(truth):
        raise InvalidData("no position has a label", "give class numbers of at least 0")
    classes, places = np.unique(np.concatenate([found, truth]), return_inverse=True)
    found, truth = np.split(places, 2)
    both, one, other = (np.bincount(p, minlength=len(classes)) for p in (truth[found == truth], found, truth))
    return float((both / (one + other - both)).mean())


def segments(output: Array) -> Array:
    """The class of each position."""
    return np.asarray(output.argmax(axis=1)) if is_float(output) else output


def _precision(scores: Array, hits: Array, total: int) -> float:
    """The average precision of one class, averaged over the overlaps. ``hits`` says which boxes match, per overlap."""
    hits = hits[np.argsort(-scores, kind="stable")].T
    precision = hits.cumsum(axis=1) / np.arange(1, hits.shape[1] + 1)
    # The curve does not rise: at each recall, the best precision at this or a higher recall.
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    return float((hits * precision).sum(axis=1).mean() / total)


def _matches(found: Array, wanted: Array) -> Array:
    """Which boxes of ``found`` match one of ``wanted``, for each overlap: [samples, boxes, overlaps].

    The boxes of a sample are in the order of falling scores. Each takes the box of its class that overlaps most, of those left.
    """
    block = max(1, _PAIRS // max(1, len(found) * wanted.shape[1]))
    hits = np.zeros((*found.shape[:2], len(_OVERLAPS)), bool)
    left = np.ones((len(found), len(_OVERLAPS), wanted.shape[1]), bool)
    for one in range(found.shape[1]):
        if one % block == 0:
            overlap = _overlaps(found[:, one : one + block], wanted)
        own = overlap[:, one % block]
        samples = np.flatnonzero((own >= _OVERLAPS[0]).any(axis=1))
        free = np.where(left[samples], own[samples, np.newaxis], -1.0)
        best = free.argmax(axis=2)[..., np.newaxis]
        hits[samples, one] = hit = np.take_along_axis(free, best, axis=2)[..., 0] >= _OVERLAPS
        row, level = np.nonzero(hit)
        left[samples[row], level, best[row, level, 0]] = False
    return hits


def _without_padding(boxes: Array) -> Array:
    """A copy in which boxes without area have class -1. The class is the last element of a box."""
    boxes = boxes.astype(np.float64)
    boxes[~(boxes[..., 2:4] > boxes[..., :2]).all(axis=-1), -1] = -1
    return boxes


def _overlaps(found: Array, wanted: Array) -> Array:
    """The intersection over the union of each pair of boxes; -1 if their classes differ."""
    first, second = found[:, :, np.newaxis], wanted[:, np.newaxis]
    corner, end = np.maximum(first[..., :2], second[..., :2]), np.minimum(first[..., 2:4], second[..., 2:4])
    common = (end - corner).clip(min=0).prod(axis=3)
    areas = [(boxes[..., 2:4] - boxes[..., :2]).clip(min=0).prod(axis=3) for boxes in (first, second)]
    union = areas[0] + areas[1] - common
    return np.where(first[..., 5] == second[..., 4], common / np.where(union > 0, union, 1), -1.0)


def _has_boxes(output: Array, labels: Array | None) -> bool:
    if not is_float(output) or output.ndim != 3 or output.shape[2] != 6:
        return False
    return labels is None or (labels.dtype.kind in "iuf" and labels.ndim == 3 and labels.shape[2] == 5)


def _without_scores(output: Array) -> Array:
    """The boxes without scores, as labels have them."""
    return np.asarray(output[..., [0, 1, 2, 3, 5]])


def _has_segments(output: Array, labels: Array | None) -> bool:
    if is_float(output):
        is_map = output.ndim >= 3 and output.shape[1] >= 2
        shape = (len(output), *output.shape[2:])
    else:
        is_map, shape = is_ids(output) and output.ndim >= 2, output.shape
    return is_map and (labels is None or (is_ids(labels) and labels.size == int(np.prod(shape))))


METRICS = (
    AccuracyMetric(
        "map",
        mean_average_precision,
        "boxes [samples, boxes, 6]: left, top, right, bottom, score, class; labels: [samples, boxes, 5], without score",
        _has_boxes,
        truth=_without_scores,
    ),
    AccuracyMetric(
        "iou",
        iou,
        "scores [samples, classes, …] or class numbers [samples, …]; labels: class numbers [samples, …]",
        _has_segments,
        truth=segments,
        kind="classes",
    ),
)
