"""Metrics of classes: top-1, top-5, agreement, F1, area under the ROC curve, average precision."""

from __future__ import annotations

import numpy as np

from penstock.errors import InvalidData
from penstock.offline.judge.metric import AccuracyMetric
from penstock.tensor import Array, DataType, as_bytes

_TOP = 5


def is_float(array: Array) -> bool:
    """True for every float type, bfloat16 included."""
    return array.dtype.kind not in "OSUb" and DataType.from_numpy(array.dtype).is_float


def is_ids(array: Array) -> bool:
    """True for class numbers: integers or booleans."""
    return array.dtype.kind in "iub"


def classes_of(output: Array, cut: float = 0.0) -> Array:
    """The class numbers in ``output``. Class numbers are returned unchanged. Scores [samples, classes, …] give the class with the
    highest score. A single score per sample gives class 1 if it is above ``cut``.
    """
    if not is_float(output):
        return output.reshape(len(output), -1) if output.ndim > 1 else output[:, None]
    if is_single(output):
        return np.asarray(output.reshape(-1, 1) > cut).astype(np.int64)
    return np.asarray(output.argmax(axis=1)).reshape(len(output), -1)


def is_single(output: Array) -> bool:
    """True if ``output`` has one float score per sample."""
    return is_float(output) and (output.ndim == 1 or output.shape[1:] == (1,))


def cut_of(output: Array) -> float:
    """The cut for single scores: one half if all of them may be probabilities, otherwise zero.

    Decide it once, on the original's outputs: on few samples, or on a candidate's outputs, all scores of any model may be from 0 to 1.
    """
    return 0.5 if bool((output >= 0).all() and (output <= 1).all()) else 0.0


def hits(output: Array, truth: Array, cut: float = 0.0) -> Array:
    """The fraction of right classes in each row. If a sample has one class, the fraction is 0 or 1.

    Output: scores [samples, classes, …], or class numbers or text [samples, …]. Labels: class numbers [samples, …]. The mean is the
    accuracy of ``sklearn.metrics.accuracy_score``.
    """
    found, truth = classes_of(output, cut), truth.reshape(len(truth), -1)
    if output.dtype.kind in "OSU":  # engines return text as bytes, files contain it as text or bytes
        found, truth = _as_bytes(found), _as_bytes(truth)
    right = found == truth
    if is_float(output):
        right &= ~np.isnan(output.reshape(len(output), -1)).any(axis=1, keepdims=True)
    return np.asarray(right.mean(axis=1), np.float64)


def _as_bytes(texts: Array) -> Array:
    return np.array([as_bytes(one) for one in texts.reshape(-1).tolist()], np.object_).reshape(texts.shape)


def top_5(output: Array, truth: Array) -> Array:
    """1 for each sample whose class has one of the five highest scores. A class that ties with five other classes does not count.

    Output: scores [samples, classes]. Labels: class numbers [samples].
    """
    truth = truth.reshape(-1)
    own = output[np.arange(len(output)), truth][:, None]
    return np.asarray((output >= own).sum(axis=1) <= _TOP, np.float64)


def f1(output: Array, truth: Array, cut: float = 0.0) -> float:
    """The macro F1 of scikit-learn: the mean of F1 over the classes, where F1 is the harmonic mean of precision and recall.

    Output: scores [samples, classes] or class numbers [samples]. Labels: class numbers [samples].
    """
    found, truth = classes_of(output, cut)[:, 0].astype(np.int64), truth.reshape(-1).astype(np.int64)
    # Count by place among the classes that occur: a table up to the largest class number may not fit in memory.
    classes, places = np.unique(np.concatenate([found, truth]), return_inverse=True)
    found, truth = np.split(places, 2)
    true, guessed = (np.bincount(one, minlength=len(classes)) for one in (truth, found))
    both = np.bincount(truth[found == truth], minlength=len(classes))
    return float((2 * both / (true + guessed)).mean())


def auc(output: Array, truth: Array) -> float:
    """The area under the ROC curve: the probability that a positive sample has a higher score than a negative sample, where ties count
    half (J. Hanley, B. McNeil, *Radiology* 143, 1982). With several classes, the mean over the classes, one against the rest.

    Output: scores [samples], [samples, 1] or [samples, classes]. Labels: class numbers [samples], or 0 and 1 [samples, classes].
    """
    return _mean_by_class(output, truth, _auc)


def average_precision(output: Array, truth: Array) -> float:
    """The mean precision at each positive sample, in descending order of scores (``average_precision_score`` of scikit-learn). With
    several classes, the mean over the classes.

    Output: scores [samples], [samples, 1] or [samples, classes]. Labels: class numbers [samples], or 0 and 1 [samples, classes].
    """
    return _mean_by_class(output, truth, _precision)


def _mean_by_class(output: Array, truth: Array, of: object) -> float:
    assert callable(of)
    scores = output.reshape(len(output), -1).astype(np.float64)
    if truth.ndim == 2 and truth.shape[1] > 1:
        pairs = [(scores[:, one], truth[:, one] > 0) for one in range(truth.shape[1])]
    elif scores.shape[1] <= 2:
        pairs = [(scores[:, -1] - (scores[:, 0] if scores.shape[1] == 2 else 0), truth.reshape(-1) > 0)]
    else:
        pairs = [(scores[:, one], truth.reshape(-1) == one) for one in range(scores.shape[1])]
    found = [of(score, positive) for score, positive in pairs if 0 < positive.sum() < len(positive)]
    if not found:
        raise InvalidData(
            "all labels are of one class, so there is nothing to rank", "give labels of at least two classes"
        )
    return float(np.mean(found))


def _auc(scores: Array, positive: Array) -> float:
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    hit = float(positive.sum())
    return float((ranks[positive].sum() - hit * (hit + 1) / 2) / (hit * (len(positive) - hit)))


def _precision(scores: Array, positive: Array) -> float:
    values, places = np.unique(-scores, return_inverse=True)
    right = np.cumsum(np.bincount(places, positive, len(values)))
    precision = right / np.cumsum(np.bincount(places, minlength=len(values)))
    return float((np.diff(right, prepend=0.0) * precision).sum() / positive.sum())


def _has_classes(output: Array, labels: Array | None) -> bool:
    """True if the labels suit the scores or class numbers of ``output``."""
    if labels is None:
        return output.dtype.kind in "OSU" or is_ids(output) or (output.ndim >= 2 and output.shape[1] >= 2)
    if not is_ids(labels):
        return labels.dtype.kind in "SU" and output.dtype.kind in "OSU" and labels.size == output.size
    if is_ids(output):
        return labels.size == output.size
    if not is_float(output) or labels.min(initial=0) < 0:
        return False
    if is_single(output):
        return labels.size == len(output) and labels.max(initial=0) <= 1
    inner = (len(output), *output.shape[2:])
    return labels.size == int(np.prod(inner)) and labels.max(initial=0) < output.shape[1]


def _has_scores(output: Array, labels: Array | None) -> bool:
    """True if each sample has one row of scores, and one class number."""
    if not is_float(output) or output.ndim != 2 or output.shape[1] < 2:
        return False
    return labels is None or (labels.size == len(output) and _has_classes(output, labels))


def _is_ranked(output: Array, labels: Array | None) -> bool:
    if labels is None or not is_ids(labels) or not is_float(output) or output.ndim > 2 or labels.min(initial=0) < 0:
        return False
    columns = output.reshape(len(output), -1).shape[1]
    if labels.ndim == 2 and labels.shape[1] > 1:
        return bool(labels.shape[1] == columns and labels.max() <= 1)
    return bool(labels.max() < max(2, columns))


def _is_classified(output: Array, labels: Array | None) -> bool:
    return labels is not None and labels.size == len(output) and is_ids(labels) and _has_classes(output, labels)


_SHARES = (0.0, 1.0)
_CLASSES = "scores [samples, classes] or class numbers [samples]; labels: class numbers [samples]"
_SCORES = "scores [samples] or [samples, classes]; labels: class numbers [samples], or 0 and 1 [samples, classes]"

METRICS = (
    AccuracyMetric(
        "top-1",
        hits,
        _CLASSES,
        lambda output, labels: labels is not None and _has_classes(output, labels),
        span=_SHARES,
        kind="classes",
        cuts=True,
    ),
    AccuracyMetric(
        "agreement",
        hits,
        "scores, class numbers or text; no labels",
        lambda output, _: _has_classes(output, None),
        truth=classes_of,
        labels=False,
        span=_SHARES,
        kind="classes",
    ),
    AccuracyMetric(
        "top-5",
        top_5,
        "scores [samples, classes]; labels: class numbers [samples]",
        _has_scores,
        truth=classes_of,
        span=_SHARES,
        kind="classes",
    ),
    AccuracyMetric("f1", f1, _CLASSES, _is_classified, kind="classes", cuts=True),
    AccuracyMetric("auc", auc, _SCORES, _is_ranked, kind="classes"),
    AccuracyMetric("average-precision", average_precision, _SCORES, _is_ranked, kind="classes"),
)
