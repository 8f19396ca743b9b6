"""Metrics of boxes and segments in images: mean average precision, intersection over union."""

from __future__ import annotations

import numpy as np

from penstock.errors import InvalidData
from penstock.offline.judge.metric import AccuracyMetric
from penstock.offline.judge.scoring.classes import is_float, is_ids
from penstock.tensor import Array

_OVERLAPS = np.arange(0.5, 1.0, 0.05)


def mean_average_precision(output: Array, truth: Array) -> float:
    """The average precision (AP) of COCO: the area under the precision-recall curve, averaged over classes and over overlaps from 0.5
    to 0.95. The area uses all points of the curve; COCO uses 101.

    Output: boxes [samples, boxes, 6] with left, top, right, bottom, score, class. Truth: labels, or the original's boxes, [samples,
    boxes, 5] without score.
    Boxes with a negative class are padding.
    """
    classes = np.unique(truth[..., 4][truth[..., 4] >= 0])
    if not len(classes):
        raise InvalidData("the labels have no boxes", "give boxes with classes of at least 0")
    return float(np.mean([_class_precision(output, truth, one) for one in classes]))


def iou(output: Array, truth: Array) -> float:
    """For each class, the intersection over the union of its positions in output and truth, over all samples. The result is the mean.

    Output: scores [samples, classes, …] or class numbers [samples, …]. Truth: labels, or the original's classes, as class numbers
    [samples, …]; negative labels are skipped.
    """
    found, truth = segments(output).reshape(-1), truth.reshape(-1)
    found, truth = found[truth >= 0], truth[truth >= 0]
    both = found == truth
    shares = [
        (both & (truth == one)).sum() / ((truth == one) | (found == one)).sum() for one in np.union1d(found, truth)
    ]
    if not shares:
        raise InvalidData("no place has a label", "give class numbers of at least 0")
    return float(np.mean(shares))


def segments(output: Array) -> Array:
    """The class of each position."""
    return np.asarray(output.argmax(axis=1)) if is_float(output) else output


def _class_precision(output: Array, truth: Array, number: float) -> float:
    """The average precision of one class, averaged over the overlaps."""
    scores, matched, total = [], [], 0
    for row, known in zip(output.astype(np.float64), truth.astype(np.float64), strict=True):
        found = row[row[:, 5] == number]
        found = found[np.argsort(-found[:, 4], kind="stable")]
        wanted = known[known[:, 4] == number]
        total += len(wanted)
        scores.append(found[:, 4])
        matched.append(_matches(found[:, :4], wanted[:, :4]))
    order = np.argsort(-np.concatenate(scores), kind="stable")
    hit = np.concatenate(matched, axis=1)[:, order]
    right = hit.cumsum(axis=1)
    precision = right / np.arange(1, hit.shape[1] + 1)
    # Make the curve non-increasing: at each recall, take the best precision at this or a higher recall.
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    return float((hit * precision).sum(axis=1).mean() / total)


def _matches(found: Array, wanted: Array) -> Array:
    """For each overlap and each box of ``found``, by falling score: True if the box is the first to match a box of ``wanted``."""
    hits = np.zeros((len(_OVERLAPS), len(found)))
    if not len(found) or not len(wanted):
        return hits
    corner = np.maximum(found[:, None, :2], wanted[None, :, :2])
    end = np.minimum(found[:, None, 2:], wanted[None, :, 2:])
    common = (end - corner).clip(min=0).prod(axis=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clip(min=0).prod(axis=1) for boxes in (found, wanted)]
    union = areas[0][:, None] + areas[1][None] - common
    overlap = common / np.where(union > 0, union, 1)
    for level, least in enumerate(_OVERLAPS):
        free = overlap.copy()
        for one in range(len(found)):
            best = int(free[one].argmax())
            if free[one, best] >= least - 1e-9:
                hits[level, one] = 1
                free[:, best] = -1
    return hits


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
