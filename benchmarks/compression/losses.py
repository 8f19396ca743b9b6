"""What a model loses against another, sample by sample, with its 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.engines.registry import get_engine
from penstock.measurement import Interval
from penstock.offline.judge.accuracy import answers
from penstock.offline.judge.intervals import bounded_interval, loss_interval
from penstock.tensor import Array


def scores(model: Artifact, samples: Dataset) -> Array:
    """By sample, 1 for a label that is hit; without labels, 1 - the error of what is given back by the norm of what was put in."""
    found = answers(get_engine("onnxruntime").load(model, {"threads": 1}), samples)["output"]
    if samples.labels is not None:
        return np.asarray(found.argmax(axis=1) == samples.labels, np.float64)
    wanted = samples.inputs["input"]
    return np.asarray(1 - np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1), np.float64).clip(0)


def score(model: Artifact, samples: Dataset) -> float:
    """The mean of ``scores``."""
    return float(scores(model, samples).mean())


def loss(before: Artifact, after: Artifact, samples: Dataset) -> Interval:
    """The difference of their scores; the interval is exact for labels, and valid otherwise."""
    differences = scores(before, samples) - scores(after, samples)
    if samples.labels is None:
        return bounded_interval(differences)
    return loss_interval(samples.count, int((differences > 0).sum()), int((differences < 0).sum()))


def points(lost: Interval) -> Interval:
    """In points of a hundred."""
    return Interval(100 * lost.value, 100 * lost.low, 100 * lost.high)


def mean(found: Sequence[Interval]) -> Interval:
    """Of several, which may share their samples: the means of the estimates and of the ends."""
    return Interval(*(float(np.mean(ends)) for ends in zip(*((x.value, x.low, x.high) for x in found), strict=True)))
