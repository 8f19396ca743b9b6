"""What a step made, measured: against the original, and against the model that it went on from."""

from __future__ import annotations

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.coded import encode
from penstock.bundle.evidence import Accuracy, Interval
from penstock.engines.registry import get_engine
from penstock.offline.compress.planner.moves import Target
from penstock.offline.dataset import Dataset
from penstock.offline.judge.accuracy import Judge, answers, make_judge
from penstock.offline.judge.contract import is_faster
from penstock.offline.judge.sessions import loaded
from penstock.perf.measure import feed, interleave, repeat_rows, speedup

_TIMING_S = 1.5
_SMALLER = 0.99
"""A step for size must save a hundredth, or it is not worth its name."""


class Measured(msgspec.Struct, frozen=True):
    """One model against the original on held-out samples, and against its parent."""

    accuracy: Accuracy
    speedup: Interval
    """Over the original."""
    gain: Interval
    """Over the parent."""
    stored_bytes: int
    """As coded; 0 where size is not the aim."""


class Bench:
    """Measures models of ``original`` on ``held``; ``smallest_batch`` rows a timed call."""

    def __init__(self, original: Artifact, held: Dataset, target: Target, threads: int) -> None:
        """Raises InvalidModel if the original does not load, InvalidData if labels fit no output."""
        self._target, self._threads, self._held = target, threads, held
        self._original = get_engine("onnxruntime").load(original, {"threads": threads})
        self.judge: Judge = make_judge(answers(self._original, held), held.labels)
        self._sample = repeat_rows(held.inputs, self._original.signature.smallest_batch)

    def measure(self, parent: Artifact, made: Artifact) -> Measured:
        """Raises PenstockError where ``made`` does not run, or answers in other shapes."""
        with loaded(parent, self._threads) as before, loaded(made, self._threads) as after:
            accuracy = self.judge.compare(answers(after, self._held))
            models = {"original": self._original, "parent": before, "made": after}
            timings = interleave({name: feed(model, self._sample) for name, model in models.items()}, _TIMING_S)
        return Measured(
            accuracy,
            speedup(timings["original"], timings["made"]),
            speedup(timings["parent"], timings["made"]),
            self.stored_bytes(made),
        )

    def stored_bytes(self, model: Artifact) -> int:
        """As coded, if that is the aim."""
        return len(encode(model.data)) if self._target == "size" else 0


def gain_objection(measured: Measured, parent: str, parent_bytes: int) -> str:
    """Why a model is no better than its parent in what it is for; empty if it is. Pure."""
    if not measured.stored_bytes:
        return "" if is_faster(measured.gain) else f"not provably faster than '{parent}': {measured.gain.value:.2f}x"
    if measured.stored_bytes <= _SMALLER * parent_bytes:
        return ""
    return f"{measured.stored_bytes:,d} bytes as coded, '{parent}' has {parent_bytes:,d}"
