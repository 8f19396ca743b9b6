"""Evidence of builds that never ran, for tests of what reads it."""

from __future__ import annotations

import msgspec

from penstock.bundle.evidence import Accuracy, CandidateRecord, Evidence
from penstock.measurement import Conditions, Interval, LatencyPoint

QUIET = Conditions(load_before=0.1, load_after=1.0, steal_percent=0.0, dirty=False)


def accuracy(value: float = 0.99, loss: float = 0.0, spread: float = 0.002, **changes: object) -> Accuracy:
    """Top-1 of ``value``, with a loss of ``loss`` ± ``spread``."""
    return msgspec.structs.replace(
        Accuracy("top-1", value, Interval(loss, loss - spread, loss + spread), 0.01, 500), **changes
    )


def record(name: str, latency_ms: float | None = 1.0, value: float = 0.99, **changes: object) -> CandidateRecord:
    """A candidate on ONNX Runtime that was outrun, its loss against an original of 99 %; None for one that failed."""
    measured = CandidateRecord(name, "onnxruntime", "fp32", 1, "outrun", "slower", size_bytes=2048)
    if latency_ms is not None:
        speed = 1.0 / latency_ms
        measured = msgspec.structs.replace(
            measured,
            latency_ms=latency_ms,
            p99_ms=1.5 * latency_ms,
            accuracy=accuracy(value, 0.99 - value),
            speedup=Interval(speed, 0.9 * speed, 1.1 * speed),
        )
    return msgspec.structs.replace(measured, **changes)


def evidence(*candidates: CandidateRecord, **changes: object) -> Evidence:
    """The evidence of a build that tried ``candidates`` against an original of 1 ms and 99 %; the first was chosen."""
    found = Evidence(
        max_accuracy_loss=0.01,
        p99_ms=None,
        baseline=record("original", speedup=None, status="baseline", reason="the original, untouched"),
        chosen=candidates[0].name if candidates else "original",
        candidates=candidates,
        conditions=QUIET,
        baseline_latency=points(1.0),
    )
    return msgspec.structs.replace(found, **changes)


def points(row_ms: float) -> tuple[LatencyPoint, ...]:
    """A profile at batches 1, 2 and 4."""
    return tuple(LatencyPoint(batch, batch**0.5 * row_ms, batch * row_ms) for batch in (1, 2, 4))
