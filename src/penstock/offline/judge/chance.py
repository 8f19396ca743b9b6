"""Check the labels against the original. If the original is no better than chance on them, the labels are probably wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.errors import InvalidData
from penstock.tensor import Array

_SHUFFLES = 39
"""Number of shuffles. With this number, the check accepts wrong labels in at most one of twenty cases."""
_FEWEST = 20
"""Minimum number of labels for the check. With fewer labels, right and wrong labels look alike."""
_ORIGINAL = "the original"
_CHECK = "check that row i of the labels belongs to row i of the inputs; "
_CHOOSE = "or judge another output or by another metric with --metric-output or --metric; "
"""Only for the original: the metric of a bundle is part of its contract."""
_TRUST = "--trust-labels accepts the labels as they are"


def check_labels(
    name: str,
    value: Callable[[Array], float],
    labels: Array,
    higher: bool,
    who: str = _ORIGINAL,
    note: str = "",
    seed: int = 0,
) -> None:
    """Raise InvalidData if the metric ``name`` is no better on ``labels`` than on shuffled labels. ``value`` computes the metric. The
    error names ``who``, the judged model, and ends with ``note`` on how the model was run.

    The check is a permutation test at 5 %. Fewer than 20 labels are not tested.
    """
    if len(labels) >= 2 and (labels == labels[:1]).all():
        raise InvalidData(
            f"all {len(labels)} labels are the same, so they cannot show whether answers are right",
            "give samples of at least two classes, or use --trust-labels",
        )
    if len(labels) < _FEWEST:
        return
    rng = np.random.default_rng(seed)
    own = value(labels)
    shuffled = [value(labels[rng.permutation(len(labels))]) for _ in range(_SHUFFLES)]
    as_good = sum(one >= own if higher else one <= own for one in shuffled)
    if as_good + 1 > (_SHUFFLES + 1) / 20:
        raise InvalidData(
            f"{who} is no better than chance on the labels: its {name} is {own:.4g}, and {float(np.median(shuffled)):.4g} "
            f"on shuffled labels{note and f'. {note[0].upper()}{note[1:]}'}",
            f"{_CHECK}{_CHOOSE if who == _ORIGINAL else ''}{_TRUST}",
        )
