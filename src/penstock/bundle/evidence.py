"""Evidence: the measurements and rejected candidates of a build, stored in the manifest so that every decision can be verified."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.measurement import Conditions, Interval, LatencyPoint

Status = Literal["baseline", "chosen", "outrun", "rejected", "failed"]


class Accuracy(msgspec.Struct, frozen=True):
    """A candidate's accuracy. It is compared with the original model's sample by sample, on the same evaluation data."""

    metric: Literal["top-1", "agreement", "fidelity"]
    """``top-1``: proportion of correct labels. ``agreement``: proportion of samples with the original's arg-max. ``fidelity``: 1 -
    mean relative error of the outputs.
    """
    value: float
    loss: Interval
    """The original's value minus the candidate's, with the 95 % interval of the paired difference."""
    relative_error: float
    """Norm of the difference from the original's output, divided by the norm of that output; for the worst output."""
    samples: int
    unjudged_output: str = ""
    """The output without labels that has the largest error; empty if there is none, or if the metric is fidelity."""
    unjudged_error: float = 0.0
    """Relative error of ``unjudged_output``."""


class CandidateRecord(msgspec.Struct, frozen=True):
    """One candidate and its result. Latencies are for one forward call of ``Evidence.rows_per_call`` rows, in milliseconds."""

    name: str
    engine: str
    precision: str
    threads: int
    status: Status
    reason: str
    calibration: str = ""
    """Calibration method and placement of an INT8 candidate."""
    compression: str = ""
    """The steps that changed weights or structure; empty if both are unchanged."""
    size_bytes: int = 0
    stored_bytes: int = 0
    """Size as a coded model; 0 if the model is stored uncoded."""
    batch: int = 1
    """The batch size with the highest throughput within the contract; measured only for finalists."""
    latency_ms: float | None = None
    p99_ms: float | None = None
    calls: int = 0
    """Number of timed calls behind the latencies."""
    speedup: Interval | None = None
    """Speed-up over the baseline, interleaved in the same run, with its 95 % interval."""
    accuracy: Accuracy | None = None
    rows_per_second: float | None = None
    """Throughput at ``batch``."""

    @property
    def disk_bytes(self) -> int:
        """Size in a bundle."""
        return self.stored_bytes or self.size_bytes


class Attempt(msgspec.Struct, frozen=True):
    """One step of a compression plan and its result, compared with the original on held-out samples."""

    name: str
    parent: str
    """The attempt whose result was the input of this step; empty for the original model."""
    outcome: Literal["kept", "rejected", "failed", "skipped"]
    reason: str
    accuracy: Accuracy | None = None
    speedup: Interval | None = None
    size_bytes: int = 0
    stored_bytes: int = 0
    """Size as a coded model; 0 if it was not coded."""
    digest: str = ""
    """Digest of the resulting model; empty if there is none."""
    seconds: float = 0.0


class Evidence(msgspec.Struct, frozen=True):
    """The record of one build."""

    max_accuracy_loss: float
    p99_ms: float | None
    baseline: CandidateRecord
    chosen: str
    """Name of the candidate that won."""
    candidates: tuple[CandidateRecord, ...]
    conditions: Conditions
    baseline_latency: tuple[LatencyPoint, ...] = ()
    """Profile of the original by batch size, interleaved with that of the chosen variant."""
    rows_per_call: int = 1
    """Number of rows per call when the candidates were timed and judged."""
    attempts: tuple[Attempt, ...] = ()
    """The attempts of a compression plan, in order."""
    optimization: dict[str, Any] = {}
    """The optimiser's report: every pass, nodes before and after, measured error."""
    data: dict[str, str] = {}
    """Digests of the calibration and evaluation data."""
    notes: tuple[str, ...] = ()
    """Remarks on the measurements."""

    @property
    def optimized(self) -> CandidateRecord | None:
        """The optimised graph in FP32 on the baseline's engine and threads. The comparison shows the gain of the passes."""
        before = self.baseline
        same = [one for one in self.candidates if (one.engine, one.threads) == (before.engine, before.threads)]
        exact = (one for one in same if one.precision == "fp32" and not one.compression)
        return next((one for one in exact if one.latency_ms is not None), None)

    def candidate(self, name: str) -> CandidateRecord:
        """The record called ``name``; KeyError if there is none."""
        for record in (self.baseline, *self.candidates):
            if record.name == name:
                return record
        raise KeyError(name)
