"""Versions of one model, each with other groups left float, judged on the same samples; each version is run once."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy, Interval
from penstock.engines.base import LoadedModel
from penstock.offline.compress.precision.groups import MixedModel
from penstock.offline.dataset import Dataset
from penstock.offline.judge.accuracy import Judge, Outputs, answers, make_judge, sample_errors
from penstock.offline.judge.sessions import loaded
from penstock.tensor import Array

_LEAST_SHARE = 1e-12
"""Probabilities below this count as this, so that the divergence of one sample is at most 28."""


class Outcome(msgspec.Struct, frozen=True):
    """What one version answered, against the original; a few bytes a sample."""

    accuracy: Accuracy
    scores: Array
    """Per sample, see ``Judge.scores``; float32."""
    divergence: Array
    """Per sample, see ``divergence``; float32."""


class Trials:
    """Judges versions of a model on data that calibration has not seen, and remembers every outcome.

    Raises InvalidData if the labels fit no output, Unsupported if the outputs cannot be compared sample by sample.
    """

    def __init__(self, mixed: MixedModel, data: Dataset, threads: int = 1) -> None:
        self.mixed, self.data, self.threads = mixed, data, threads
        self._known: dict[frozenset[str], Outcome] = {}
        with self.load(mixed.artifact) as model:
            self.judge: Judge = make_judge(answers(model, data), data.labels)
            self.signature = model.signature
        self.original = self._judge(self.judge.reference)

    @property
    def count(self) -> int:
        """Versions run so far."""
        return len(self._known)

    @property
    def proxy(self) -> str:
        """What ``Outcome.divergence`` is."""
        return "relative error" if self.judge.metric == "fidelity" else "KL divergence"

    def load(self, artifact: Artifact) -> AbstractContextManager[LoadedModel]:
        """As it would be served: an engine that rewrites nothing adds up otherwise, and takes several times as long."""
        return loaded(artifact, self.threads)

    def outcome(self, floats: Collection[str] = ()) -> Outcome:
        """Of the INT8 model with the groups ``floats`` left float."""
        key = frozenset(floats)
        if key not in self._known:
            with self.load(self.mixed.with_float(key)) as model:
                self._known[key] = self._judge(answers(model, self.data))
        return self._known[key]

    def gain(self, before: Collection[str], after: Collection[str]) -> Interval:
        """How much more accurate the version with ``after`` float is than that with ``before``."""
        return self.judge.interval(self.outcome(after).scores - self.outcome(before).scores)

    def _judge(self, outputs: Outputs) -> Outcome:
        scores = self.judge.scores(outputs).astype(np.float32)
        return Outcome(self.judge.compare(outputs), scores, divergence(self.judge, outputs))


def divergence(judge: Judge, outputs: Outputs) -> Array:
    """How far ``outputs`` are from the original's, per sample, float32: where accuracy moves in steps, this moves smoothly.

    KL(original‖outputs) of the class shares, summed over the outputs that hold class scores and are judged: softmax of the
    scores, or the scores themselves where they are shares already. Relative error where the metric is fidelity.
    """
    if judge.metric == "fidelity":
        return np.asarray(sample_errors(judge.reference, outputs), np.float32)
    judged = [judge.output] if judge.labels is not None else list(judge.reference)
    total = np.zeros(len(judge.reference[judge.output]))
    for name in judged:
        are_shares = _are_shares(judge.reference[name])
        want, got = (_log_shares(array, are_shares) for array in (judge.reference[name], outputs[name]))
        total += (np.exp(want) * (want - got)).sum(axis=1)
    return total.clip(min=0.0).astype(np.float32)


def _are_shares(scores: Array) -> bool:
    return bool((scores >= 0).all() and np.allclose(scores.astype(np.float64).sum(axis=1), 1, atol=1e-3))


def _log_shares(scores: Array, are_shares: bool) -> Array:
    """Logarithms of each row's shares, at least that of the least share; of a row with NaN or infinity, that everywhere."""
    scores = scores.astype(np.float64)
    broken = ~np.isfinite(scores).all(axis=1, keepdims=True)
    scores = np.where(broken, 0.0, scores)
    if not are_shares:
        shifted = scores - scores.max(axis=1, keepdims=True)
        shares = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    else:
        shares = scores
    return np.asarray(np.log(np.where(broken, _LEAST_SHARE, np.clip(shares, _LEAST_SHARE, None))))
