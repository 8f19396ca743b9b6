"""Titles and outcomes, made from records of real candidates and with the reasons of the real contract and search."""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest

import models
from evidences import accuracy, record
from penstock.bundle.evidence import CandidateRecord
from penstock.bundle.titles import outcome, steps_title, title, verdict
from penstock.measurement import Interval
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.table import METHODS
from penstock.offline.compress.versions.versions import Version
from penstock.offline.judge.contract import Contract, unproven_speed
from penstock.offline.tune.search import Trial, explain, explain_sizes
from penstock.offline.tune.search import record as recorded
from penstock.offline.tune.space import candidates, originals
from penstock.perf.measure import Timings
from penstock.resources import machine_facts

CONTRACT = Contract(max_accuracy_loss=0.01, p99_ms=5.0)
CALIBRATIONS = [
    "dynamic",
    *("-".join(pair) for pair in product([*(m.value for m in RangeMethod), "best"], [p.value for p in QdqPlacement])),
    *(
        f"best-{placement.value}-{kind}"
        for placement in QdqPlacement
        for kind in ("per-tensor", "symmetric", "transposed")
    ),
]
STEPS = [step.name for entry in METHODS.values() for step in entry.steps]


def records() -> list[CandidateRecord]:
    """One record of every kind of candidate that a build can make."""
    model = models.linear()
    versions = [
        Version(model),
        *(Version(model, "int8", calibration=calibration) for calibration in CALIBRATIONS),
        *(Version(model, "int8" if "int8" in step else "fp32", compression=step) for step in STEPS),
        Version(model, "int8", compression="shrink-2x+int8"),
    ]
    every = [
        *originals(model, (1, 2)),
        *candidates(versions, ("onnxruntime", "openvino"), (1, 2), machine_facts()),
    ]
    return [recorded(Trial(candidate), CONTRACT) for candidate in every]


def test_titles_differ_where_names_differ() -> None:
    made = records()
    titles = [title(one) for one in made]
    assert len({one.name for one in made}) == len(made)
    assert len(set(titles)) == len(made)


@pytest.mark.parametrize("one", records(), ids=lambda one: one.name)
def test_a_title_has_no_word_of_the_program(one: CandidateRecord) -> None:
    shown = title(one)
    assert one.name not in shown
    for word in ("onnxruntime", "openvino", "best", "wide", "linear", "-t1", "int8", "fp32", "  ", "· ·", "()"):
        assert word not in shown
    assert shown.endswith(" · 1 thread" if one.threads == 1 else f" · {one.threads} threads")


def test_some_titles() -> None:
    int8 = record("openvino-int8-best-wide-t2", engine="openvino", precision="int8", threads=2)
    assert title(int8) == "OpenVINO · INT8 · 2 threads"
    best = msgspec.structs.replace(int8, calibration="best-wide")
    assert title(best) == "OpenVINO · INT8 (tuned ranges, more operators) · 2 threads"
    small = record("onnxruntime-shrink-1.5x+int8-int8-t1", compression="shrink-1.5x+int8", precision="int8")
    assert title(small) == "ONNX Runtime · INT8 · channels removed for 1.5x · 1 thread"
    assert title(record("original-t1", status="baseline")) == "Original · ONNX Runtime · 1 thread"


def test_steps_of_a_plan_are_told_in_words() -> None:
    assert steps_title("shrink-1.5x+int8-mixed") == "channels removed for 1.5x, INT8 partly FP32"
    assert steps_title("original") == "original"
    trained = record("onnxruntime-int8-qat-int8-t1", compression="int8-qat", precision="int8")
    assert title(trained) == "ONNX Runtime · INT8 · with training · 1 thread"
    for step in STEPS:
        assert step not in steps_title(step).split()


def test_what_a_newer_version_wrote_keeps_its_own_words() -> None:
    how = {"engine": "npu", "precision": "int3", "calibration": "magic", "compression": "melt", "threads": 0}
    newer = record("npu-melt-int3-magic-t0", **how)
    assert title(newer) == "npu · INT3 (magic) · melt · default threads"
    assert outcome(record("x", status="paused", reason="later")) == "paused"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "changes", "expected"),
    [
        (0.05, {}, "less accurate than allowed"),
        (0.0, {"unjudged_output": "boxes", "unjudged_error": 0.5}, "less accurate than allowed"),
        (
            0.0,
            {"broken": "output 'y' is NaN or infinite in 3 of 9 samples, first in sample 0"},
            "outputs are not finite",
        ),
    ],
)
def test_outcomes_of_the_accuracy_limits(loss: float, changes: dict[str, object], expected: str) -> None:
    reason = CONTRACT.accuracy_objection(accuracy(0.9, loss, **changes))
    refused = record("a", status="rejected", reason=reason)
    assert reason
    assert outcome(refused) == expected
    assert verdict(refused) == f"{expected}: {reason}"


def test_outcomes_of_the_other_limits() -> None:
    proof = msgspec.structs.replace(CONTRACT, prove_accuracy=True)
    unproved = proof.accuracy_objection(accuracy(0.99, 0.005, 0.02, bound=0.02))
    assert outcome(record("a", status="rejected", reason=unproved)) == "not proven to be accurate enough"
    slow = CONTRACT.latency_objection(6.0)
    assert outcome(record("a", status="rejected", reason=slow)) == "slower than allowed"
    assert outcome(record("a", status="failed", reason="out of memory")) == "failed"
    assert verdict(record("a", status="failed", reason="out of memory")) == "failed: out of memory"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("not timed: there was no time within --budget", "not timed"),
        ("not judged: there was no time within --budget", "not judged"),
        ("the same operators as a, which is at least as accurate", "as fast, not more accurate"),
    ],
)
def test_outcomes_of_candidates_that_did_not_compete(reason: str, expected: str) -> None:
    assert outcome(record("b", reason=reason)) == expected


@pytest.mark.parametrize(
    ("speed", "busy", "expected"),
    [
        (Interval(0.8, 0.7, 0.9), "", "slower"),
        (Interval(1.0, 0.9, 1.1), "", "not faster"),
        (Interval(1.0, 0.9, 1.1), "make", "machine too busy to tell"),
    ],
)
def test_outcomes_of_speeds_against_the_original(speed: Interval, busy: str, expected: str) -> None:
    beaten = record("a", reason=unproven_speed("the original", speed, busy))
    assert outcome(beaten) == expected
    assert verdict(beaten) == beaten.reason


def trial(pace: float, threads: int = 1, size: int = 1) -> Trial:
    """A trial that is ``pace`` times as fast as the original with one thread."""
    (candidate,) = originals(models.linear(), (threads,))
    candidate = msgspec.structs.replace(candidate, stored_bytes=1000 * size)
    timings = Timings(np.full((8, 1), 1e-3 / pace))
    return Trial(candidate, accuracy=accuracy(), pace=pace, speedup=Interval(pace, pace, pace), timings=timings)


def outcomes(*trials: Trial) -> list[str]:
    return [outcome(recorded(one, CONTRACT)) for one in trials]


def test_outcomes_of_a_choice_by_speed() -> None:
    base = msgspec.structs.replace(trial(1.0), status="baseline")
    winner, slower, close, costly = trial(2.0), trial(1.5), trial(1.99), trial(2.2, threads=2)
    explain(winner, [base], [winner, slower, close, costly])
    assert outcomes(winner, slower, close, costly) == [
        "chosen",
        "slower than the chosen one",
        "nearly as good",
        "not worth its threads",
    ]
    assert outcomes(base) == ["the original"]
    assert verdict(recorded(winner, CONTRACT)).startswith("chosen: 2.00x")


def test_outcomes_of_a_choice_by_size() -> None:
    base = msgspec.structs.replace(trial(1.0, size=3), status="baseline")
    winner, larger, slower = trial(1.0), trial(2.0, size=2), trial(0.5)
    explain_sizes(winner, [base], [winner, larger, slower])
    assert outcomes(winner, larger, slower, base) == ["chosen", "larger", "slower", "the original"]
