from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundles import FILES, manifest_for
from evidences import QUIET, accuracy, evidence, record
from penstock.artifact import Format
from penstock.bundle.evidence import CandidateRecord, Evidence
from penstock.bundle.manifest import Manifest, SourceModel
from penstock.measurement import Interval
from penstock.perf.conclusion import conclude, headline, is_exact, is_too_slow, size_words

INT8 = record(
    "int8",
    0.5,
    precision="int8",
    status="chosen",
    reason="2.00x (1.80 … 2.20) the original's speed",
    size_bytes=512,
    accuracy=accuracy(0.985, 0.005, bound=0.008),
)
KEPT = record("original", status="chosen", speedup=None, reason="the original: nothing was provably faster")
BUSY = "other processes used 1.2 of 2 cores"


def manifest(found: Evidence) -> Manifest:
    return manifest_for(FILES, evidence=found, source=SourceModel("ab" * 32, Format.ONNX, "digits.onnx"))


def text(found: Evidence, bundle: str = "") -> str:
    return " ".join(text for _, text in conclude(manifest(found), found, bundle))


def kept(*candidates: CandidateRecord, **changes: object) -> Evidence:
    return evidence(*candidates, baseline=KEPT, chosen="original", **changes)


def test_what_was_asked() -> None:
    found = evidence(INT8, metric="top-1", p99_ms=5.0)
    assert text(found).startswith(
        "Make digits.onnx as fast as possible on this machine, with a loss of at most 1.00% in top-1 "
        "accuracy and a p99 of at most 5 ms per call. "
    )
    assert "on calls of 16 rows, with" in text(msgspec.structs.replace(found, rows_per_call=16))
    assert "accuracy, proven with 95 % confidence and" in text(msgspec.structs.replace(found, prove_accuracy=True))
    unlimited = msgspec.structs.replace(found, metric="fidelity", max_output_error=None, p99_ms=None)
    assert "on this machine, with any loss in fidelity to the original's outputs. Penstock" in text(unlimited)


def test_a_model_that_should_be_small() -> None:
    found = evidence(INT8)
    coded = msgspec.structs.replace(manifest(found).variants[0], coding="coded")
    made = msgspec.structs.replace(manifest(found), variants=(coded,))
    assert "Make digits.onnx as small as possible" in conclude(made, found)[0][1]


def test_what_came_out() -> None:
    found = text(evidence(INT8, record("other"), record("original-t2", status="baseline", speedup=None)))
    assert (
        "Penstock tried 2 candidates and chose ONNX Runtime · INT8 · 1 thread: one call takes 0.5 ms instead of 1 ms."
        in found
    )
    assert "On 500 samples, its top-1 accuracy is 98.50%; the original's is 99.00%." in found
    assert "The model takes 0.50 KiB instead of 2.00 KiB." in found
    same = msgspec.structs.replace(INT8, accuracy=accuracy(0.99))
    assert "its top-1 accuracy is 99.00%, as the original's." in text(evidence(same))
    assert "The model takes 2.00 KiB, as the original." in text(
        evidence(msgspec.structs.replace(INT8, size_bytes=2048))
    )


def test_an_original_that_is_kept() -> None:
    found = kept(record("slow", 2.0))
    assert headline(found) == "The original is kept: nothing was provably faster"
    assert "Penstock tried 1 candidate and kept the original, unmodified (Original · ONNX Runtime · 1 thread)." in text(
        found
    )
    assert "speed-up" not in text(found)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "2.00 times as fast, 4.0 times smaller, 0.50% loss of top-1 accuracy"),
        ({"accuracy": accuracy(0.99)}, "2.00 times as fast, 4.0 times smaller, no measured loss of top-1 accuracy"),
        ({"size_bytes": 2000}, "2.00 times as fast, 0.50% loss of top-1 accuracy"),
        ({"size_bytes": 4096}, "2.00 times as fast, 2.0 times larger, 0.50% loss of top-1 accuracy"),
        ({"speedup": Interval(1.0, 0.9, 1.1)}, "Not provably faster, 4.0 times smaller, 0.50% loss of top-1 accuracy"),
        ({"speedup": Interval(0.8, 0.7, 0.9)}, "0.80 times the speed, 4.0 times smaller, 0.50% loss of top-1 accuracy"),
        ({"stored_bytes": 128}, "2.00 times as fast, 16.0 times smaller, 0.50% loss of top-1 accuracy"),
    ],
)
def test_the_headline(changes: dict[str, object], line: str) -> None:
    assert headline(evidence(msgspec.structs.replace(INT8, **changes))) == line


def test_a_speed_up_that_may_be_none_is_called_so() -> None:
    assert "The speed-up is 2.00, with 95 % confidence between 1.80 and 2.20. " in text(evidence(INT8))
    doubtful = msgspec.structs.replace(INT8, speedup=Interval(1.05, 0.95, 1.15))
    assert "between 0.95 and 1.15, so it may be no faster." in text(evidence(doubtful))


def test_a_proven_loss_and_an_estimate_differ() -> None:
    proven = text(evidence(INT8))
    assert "With 95 % confidence, the loss is at most 0.80%, within the limit of 1.00%." in proven
    assert "evaluate on more samples" not in proven
    estimate = text(evidence(msgspec.structs.replace(INT8, accuracy=accuracy(0.985, 0.005, bound=0.015))))
    assert (
        "the loss is within 1.00% is an estimate and not proven: with 95 % confidence, it is at most 1.50%." in estimate
    )
    assert "To be more certain of the loss, evaluate on more samples." in estimate


@given(st.floats(0, 0.05), st.floats(0.001, 0.05))
def test_a_loss_is_called_proven_only_if_its_bound_is_within_the_limit(bound: float, limit: float) -> None:
    found = text(evidence(msgspec.structs.replace(INT8, accuracy=accuracy(bound=bound)), max_accuracy_loss=limit))
    assert ("within the limit" in found) == (bound <= limit)
    assert ("not proven" in found) == (bound > limit)


def test_an_exact_candidate_has_no_loss_to_prove() -> None:
    exact = record("fp32", 0.5, status="chosen", accuracy=accuracy(0.99, 0.0, bound=0.05))
    found = text(evidence(exact))
    assert is_exact(exact)
    assert "the outputs differ only by rounding" in found
    assert "not proven" not in found
    assert not is_exact(msgspec.structs.replace(exact, compression="prune"))


def test_a_busy_machine_is_named_with_its_remedy() -> None:
    conditions = msgspec.structs.replace(QUIET, dirty=True, busy=BUSY)
    busy = evidence(msgspec.structs.replace(INT8, busy=BUSY), conditions=conditions)
    assert f"The machine was busy during the timing ({BUSY}), so all times" in text(busy)
    assert "Build again on a quiet machine" in text(busy)
    other = text(evidence(INT8, record("other", busy=BUSY), conditions=conditions))
    assert "busy" not in other, "the chosen candidate's own timings were not disturbed"


def test_rows_of_both_kinds_of_data_are_named() -> None:
    assert "3 evaluation rows are also calibration rows" in text(evidence(INT8, seen_rows=3))
    assert "evaluation rows" not in text(evidence(INT8))


def test_a_much_faster_candidate_that_was_rejected_is_named_with_its_option() -> None:
    reason = "loses 2.00% top-1, 1.00% are allowed"
    fast = record("fast", 0.25, 0.97, precision="int8", threads=2, status="rejected", reason=reason)
    found = text(evidence(INT8, fast))
    assert f"ONNX Runtime · INT8 · 2 threads is 4.00 times as fast as the original but was rejected: {reason}." in found
    assert "raise `--max-accuracy-loss`." in found
    busy = text(evidence(INT8, msgspec.structs.replace(fast, busy=BUSY)))
    assert "as fast as the original (measured on a busy machine) but was rejected" in busy
    assert "--max-accuracy-loss" in text(kept(fast))
    of_output = msgspec.structs.replace(fast, accuracy=accuracy(0.99, unjudged_output="y", unjudged_error=0.3))
    assert "raise `--max-output-error`." in text(evidence(INT8, of_output))
    for changes in (
        {"latency_ms": 0.49},
        {"reason": "p99 3 ms, 2 ms are allowed"},
        {"speedup": Interval(1.1, 0.9, 1.3)},
        {"accuracy": accuracy(broken="output 'y' is NaN")},
        {"status": "outrun"},
        {"latency_ms": None},
    ):
        assert "was rejected" not in text(evidence(INT8, msgspec.structs.replace(fast, **changes)))


def test_the_last_sentence_is_a_command_that_a_shell_takes() -> None:
    assert text(evidence(INT8)).endswith("Serve the bundle with `penstock serve BUNDLE`.")
    assert text(evidence(INT8), "my bundle.zip").endswith("`penstock serve 'my bundle.zip'`.")


def test_too_slow_is_not_too_inaccurate() -> None:
    assert is_too_slow(record("a", status="rejected", reason="p99 3 ms, 2 ms are allowed (--p99)"))
    assert not is_too_slow(record("a", status="rejected", reason="loses 2 %"))
    assert not is_too_slow(record("a", reason="p99"))


@given(st.integers(1, 1 << 40))
def test_sizes_are_within_half_a_per_cent(size_bytes: int) -> None:
    number, unit = size_words(size_bytes).split()
    shown = float(number.replace(",", "")) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit]
    assert math.isclose(shown, size_bytes, rel_tol=0.006, abs_tol=6)


@given(
    st.sampled_from(["", "top-1", "fidelity", "mae"]),
    st.one_of(st.none(), st.floats(1e-3, 1e3)),
    st.floats(0, 1),
    st.booleans(),
)
def test_any_evidence_makes_sentences(metric: str, latency_ms: float | None, value: float, is_kept: bool) -> None:
    one = record("one", latency_ms, value, status="rejected", reason="loses")
    found = kept(one, metric=metric) if is_kept else evidence(INT8, one, metric=metric)
    parts = conclude(manifest(found), found)
    labels = [label for label, _ in parts]
    assert labels == [label for label in ("Asked", "Result", "Certainty", "Next") if label in labels]
    assert {"Asked", "Result", "Next"} <= set(labels)
    for part in (headline(found) + ".", *(text for _, text in parts)):
        assert part.endswith(".")
        assert "nan" not in part.lower()
        assert "None" not in part
