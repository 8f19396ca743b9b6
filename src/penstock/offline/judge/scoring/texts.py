"""Metrics of text and tokens: perplexity, word and character error rate."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from penstock.errors import InvalidData
from penstock.offline.judge.metric import AccuracyMetric, itself
from penstock.offline.judge.scoring.classes import is_float, is_ids
from penstock.tensor import Array

_MAX_LOG = 700.0


def perplexity(output: Array, truth: Array) -> float:
    """The exponential of the mean negative log-likelihood of the labels.

    Output: scores of tokens before softmax [samples, positions, tokens], or [samples, tokens]. Labels: the next token of each position
    [samples, positions]; negative labels are skipped.
    """
    scores = output.reshape(-1, output.shape[-1]).astype(np.float64)
    tokens = truth.reshape(-1)
    scores, tokens = scores[tokens >= 0], tokens[tokens >= 0]
    if not len(tokens):
        raise InvalidData("no position has a label", "give tokens of at least 0")
    top = scores.max(axis=1)
    totals = top + np.log(np.exp(scores - top[:, None]).sum(axis=1))
    loss = float((totals - scores[np.arange(len(tokens)), tokens]).mean())
    return math.exp(min(loss, _MAX_LOG))


def wer(output: Array, truth: Array) -> float:
    """The word error rate: the number of words to insert, delete or replace, divided by the number of words of the truth. For token
    numbers, it is the token error rate.

    Output: text [samples], or token numbers [samples, positions], where negative numbers are padding. Labels (or the original's
    output): in the same form as the output.
    """
    return _error_rate(output, truth, str.split)


def cer(output: Array, truth: Array) -> float:
    """The character error rate: computed like ``wer``, but for characters."""
    return _error_rate(output, truth, list)


def distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """The least number of insertions, deletions and replacements that turn ``a`` into ``b`` (V. Levenshtein, 1966).

    A column of the distance table is stored as two integers, whose bits mark where the column rises and falls (G. Myers, *Journal of
    the ACM* 46, 1999). A step therefore costs a few operations on integers instead of ``len(a)`` comparisons.
    """
    places: dict[Hashable, int] = {}
    for i, one in enumerate(a):
        places[one] = places.get(one, 0) | 1 << i
    every = (1 << len(a)) - 1
    rises, falls, found = every, 0, len(a)
    for other in b:
        same = places.get(other, 0)
        level = (((same & rises) + rises) ^ rises) | same
        up, down = falls | (every & ~(level | rises)), rises & level
        found += (up >> len(a) - 1 & 1) - (down >> len(a) - 1 & 1) if a else 1
        up, down = up << 1 | 1, down << 1
        rises, falls = (down | ~(same | falls | up)) & every, up & (same | falls) & every
    return found


def _error_rate(output: Array, truth: Array, split: object) -> float:
    got, want = (_sequences(array, split) for array in (output, truth))
    length = sum(map(len, want))
    return sum(map(distance, got, want)) / max(1, length)


def _sequences(array: Array, split: object) -> list[list[Hashable]]:
    if is_ids(array):
        return [[int(token) for token in row if token >= 0] for row in array.reshape(len(array), -1)]
    assert callable(split)
    texts = (one[0] for one in array.reshape(len(array), -1).tolist())
    return [list(split(one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one))) for one in texts]


def _predicts(output: Array, labels: Array | None) -> bool:
    return (
        labels is not None
        and is_float(output)
        and output.ndim >= 2
        and is_ids(labels)
        and labels.size * output.shape[-1] == output.size
        and bool(labels.max(initial=0) < output.shape[-1])
    )


def _writes(output: Array, labels: Array | None) -> bool:
    for array in (output, *(() if labels is None else (labels,))):
        is_text = array.dtype.kind in "OSU" and array.size == len(array)
        if not is_text and not is_ids(array):
            return False
    return labels is None or (is_ids(labels) == is_ids(output))


_TEXT = "text [samples] or token numbers [samples, positions]; labels: the same"

METRICS = (
    AccuracyMetric(
        "perplexity",
        perplexity,
        "scores before softmax [samples, positions, tokens]; labels: tokens [samples, positions]",
        _predicts,
        higher=False,
        relative=True,
        kind="numbers",
    ),
    AccuracyMetric("wer", wer, _TEXT, _writes, truth=itself, higher=False, kind="other"),
    AccuracyMetric("cer", cer, _TEXT, _writes, truth=itself, higher=False, kind="other"),
)
