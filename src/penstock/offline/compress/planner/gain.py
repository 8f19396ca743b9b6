"""The measurement of one step of a plan, against the original and against the step's parent model."""

from __future__ import annotations

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.coded import encode
from penstock.bundle.evidence import Accuracy
from penstock.measurement import Interval
from penstock.offline.compress.table import Target
from penstock.offline.judge.contract import is_faster, unproven_speed
from penstock.offline.judge.judge import ORIGINAL, Judge
from penstock.perf.measure import speedup

_TIMING_S = 1.5
_SMALLER = 0.99
"""Maximum size of a kept model relative to its parent."""


class StepGain(msgspec.Struct, frozen=True):
    """The accuracy, speed and size of a step's result."""

    accuracy: Accuracy
    speedup: Interval
    """Speed-up over the original."""
    gain: Interval
    """Speed-up over the parent."""
    stored_bytes: int
    """Size as a coded model; 0 when optimising for latency."""
    busy: str = ""
    """Other load on the machine that disturbed the timing; empty if there was none."""


def measure(judge: Judge, parent: Artifact, made: Artifact, target: Target) -> StepGain:
    """Measure ``made``. Raises PenstockError if ``made`` does not run or its outputs have other shapes."""
    accuracy = judge.assess(made).accuracy
    rows = judge.signature.smallest_batch
    timings = judge.race({"parent": parent, "made": made}, _TIMING_S, rows)
    return StepGain(
        accuracy,
        speedup(timings[ORIGINAL], timings["made"]),
        speedup(timings["parent"], timings["made"]),
        stored_bytes(made, target),
        timings["made"].busy,
    )


def stored_bytes(model: Artifact, target: Target) -> int:
    """The size of ``model`` as a coded model, or of its files if it has several; 0 when optimising for latency."""
    if target != "size":
        return 0
    return model.size_bytes if model.beside else len(encode(model.data))


def gain_objection(measured: StepGain, parent: str, parent_bytes: int) -> str:
    """The reason why a model does not improve on its parent; empty if the model is an improvement."""
    if not measured.stored_bytes:
        verdict = unproven_speed(f"'{parent}'", measured.gain, measured.busy)
        return "" if is_faster(measured.gain) else f"{verdict}: {measured.gain.value:.2f}x"
    if measured.stored_bytes <= _SMALLER * parent_bytes:
        return ""
    return f"{measured.stored_bytes:,d} bytes as a coded model, '{parent}' has {parent_bytes:,d}"
