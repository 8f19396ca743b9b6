"""Evidence: what a build measured, tried and rejected, kept in the manifest so that every decision can be checked again."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.measurement import Conditions, Interval, LatencyPoint

Status = Literal["baseline", "chosen", "outrun", "rejected", "failed"]


class Accuracy(msgspec.Struct, frozen=True):
    """A candidate's accuracy against the original model, sample by sample on the same evaluation data."""

    metric: Literal["top-1", "agreement", "fidelity"]
    """``top-1``: share of labels hit. ``agreement``: share of samples where the arg-max is the original's.
    ``fidelity``: 1 - mean relative error of the outputs."""
    value: float
    loss: Interval
    """The original's value minus this one, with the 95 % interval of the paired difference."""
    relative_error: float
    """Norm of the difference from the original's output, divided by its norm; of the worst output."""
    samples: int
    unjudged_output: str = ""
    """The worst of the outputs that no label judges; empty if there is none, or if the metric is fidelity."""
    unjudged_error: float = 0.0
    """Its relative error."""


class CandidateRecord(msgspec.Struct, frozen=True):
    """One candidate and its fate. Latencies are of one forward call of ``Evidence.rows_per_call`` rows, in milliseconds."""

    name: str
    engine: str
    precision: str
    threads: int
    status: Status
    reason: str
    calibration: str = ""
    """Calibration method and placement of an INT8 candidate."""
    compression: str = ""
    """The steps that changed its weights or its structure; empty if it has the original's own."""
    size_bytes: int = 0
    stored_bytes: int = 0
    """Its bytes as coded; 0 if it is stored as it is."""
    batch: int = 1
    """Batch of highest throughput that the contract allows; measured for finalists."""
    latency_ms: float | None = None
    p99_ms: float | None = None
    calls: int = 0
    """How many timed calls stand behind the latencies."""
    speedup: Interval | None = None
    """Against the baseline, interleaved in the same run, with its 95 % interval."""
    accuracy: Accuracy | None = None
    rows_per_second: float | None = None
    """At ``batch``."""

    @property
    def disk_bytes(self) -> int:
        """What it takes in a bundle."""
        return self.stored_bytes or self.size_bytes


class Attempt(msgspec.Struct, frozen=True):
    """One step that a compression plan tried, and what came of it, held against the original on samples of its own."""

    name: str
    parent: str
    """The attempt that it went on from; empty for the original."""
    outcome: Literal["kept", "rejected", "failed", "skipped"]
    reason: str
    accuracy: Accuracy | None = None
    speedup: Interval | None = None
    size_bytes: int = 0
    stored_bytes: int = 0
    """As coded; 0 if it was not coded."""
    digest: str = ""
    """Of the model that it made; empty if there is none."""
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
    """Profile of the original by batch size, measured beside the chosen variant's."""
    rows_per_call: int = 1
    """Rows in the calls that candidates were timed and judged on."""
    attempts: tuple[Attempt, ...] = ()
    """What a compression plan tried, in order."""
    optimization: dict[str, Any] = {}
    """The optimiser's report: every pass, nodes before and after, error measured."""
    data: dict[str, str] = {}
    """Digests of the calibration and evaluation data."""
    notes: tuple[str, ...] = ()
    """What a reader of the figures should know."""

    @property
    def optimized(self) -> CandidateRecord | None:
        """The optimised graph as FP32 on the baseline's engine and threads: beside the baseline, what the passes gained."""
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
