"""The measurement of one step of a plan: against the original, and against the model that the step went on from."""

from __future__ import annotations

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.coded import encode
from penstock.bundle.evidence import Accuracy
from penstock.measurement import Interval
from penstock.offline.compress.table import Target
from penstock.offline.judge.contract import is_faster
from penstock.offline.judge.judge import ORIGINAL, Judge
from penstock.perf.measure import speedup

_TIMING_S = 1.5
_SMALLER = 0.99
"""A step for size must save at least a hundredth."""


class StepGain(msgspec.Struct, frozen=True):
    """One model against the original on held-out samples, and against its parent."""

    accuracy: Accuracy
    speedup: Interval
    """Over the original."""
    gain: Interval
    """Over the parent."""
    stored_bytes: int
    """As coded; 0 when optimising for latency."""


def measure(judge: Judge, parent: Artifact, made: Artifact, target: Target) -> StepGain:
    """Raises PenstockError where ``made`` does not run, or answers in other shapes."""
    accuracy = judge.assess(made).accuracy
    rows = judge.signature.smallest_batch
    timings = judge.race({"parent": parent, "made": made}, _TIMING_S, rows)
    return StepGain(
        accuracy,
        speedup(timings[ORIGINAL], timings["made"]),
        speedup(timings["parent"], timings["made"]),
        stored_bytes(made, target),
    )


def stored_bytes(model: Artifact, target: Target) -> int:
    """The size of ``model`` as coded; 0 when optimising for latency, which does not need it."""
    return len(encode(model.data)) if target == "size" else 0


def gain_objection(measured: StepGain, parent: str, parent_bytes: int) -> str:
    """The reason why a model is no better than its parent in what the plan optimises; empty if it is better. Pure."""
    if not measured.stored_bytes:
        return "" if is_faster(measured.gain) else f"not provably faster than '{parent}': {measured.gain.value:.2f}x"
    if measured.stored_bytes <= _SMALLER * parent_bytes:
        return ""
    return f"{measured.stored_bytes:,d} bytes as coded, '{parent}' has {parent_bytes:,d}"
