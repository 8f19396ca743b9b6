"""Evidence: the measurements and rejected candidates of a build, stored in the manifest so that every decision can be verified."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from penstock.measurement import Conditions, Interval, LatencyPoint, percent

Status = Literal["baseline", "chosen", "outrun", "rejected", "failed"]


class Accuracy(msgspec.Struct, frozen=True):
    """A candidate's accuracy, compared sample by sample with the original model's on the same evaluation data."""

    metric: str
    """Name of the metric; ``penstock build --help`` lists all. ``agreement``: proportion of samples with the original's class.
    ``fidelity``: 1 - mean difference from the original's outputs, relative to their spread.
    """
    value: float
    loss: Interval
    """Loss of the candidate against the original, with its 95 % interval. The loss is a difference of the values. For errors without a
    scale, such as mae, it is a fraction of the original's value."""
    relative_error: float
    """Norm of the difference from the original's output, divided by the norm of that output. The worst output counts."""
    samples: int
    bound: float | None = None
    """Upper bound of the loss at 95 % confidence; None in bundles of older versions."""
    spread: float = 0.0
    """Standard deviation of the samples' losses, if the metric is the mean of their scores; otherwise 0."""
    lost: int = 0
    won: int = 0
    """Numbers of samples that only the original, and only the candidate, gets right; 0 if the metric does not count right samples."""
    looks: int = 1
    """The confidence of 95 % holds for the intervals and bounds of this number of candidates together."""
    unjudged_output: str = ""
    """The output that differs most from the original's, if the loss does not compare it with the original; empty if none."""
    unjudged_error: float = 0.0
    """The fraction of changed classes in ``unjudged_output``, or its error relative to the spread of the original's output."""
    broken: str = ""
    """The places of NaN and infinities in the outputs; empty if there are none. If not empty, the other figures are not valid."""
    is_share: bool = True
    """True if ``value`` is displayed in per cent."""

    @property
    def shown(self) -> str:
        """``value`` for people."""
        return self.show(self.value)

    def show(self, value: float) -> str:
        """A value of the metric for people."""
        return f"{value:.2%}" if self.is_share else f"{value:.4g}"

    @property
    def level(self) -> float:
        """A figure whose best value is 1: ``value`` if ``is_share``, otherwise 1 minus the loss."""
        return self.value if self.is_share else 1 - self.loss.value


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
    """Number of timed calls from which the latencies were computed."""
    speedup: Interval | None = None
    """Speed-up over the original with as many threads, timed in turns with it, with its 95 % interval."""
    accuracy: Accuracy | None = None
    rows_per_second: float | None = None
    """Throughput at ``batch``."""

    @property
    def disk_bytes(self) -> int:
        """Size in a bundle, in bytes."""
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
    """Profile of the original by batch size. Its calls were interleaved with calls of the chosen variant."""
    rows_per_call: int = 1
    """Number of rows per call when the candidates were timed and judged."""
    attempts: tuple[Attempt, ...] = ()
    """The attempts of a compression plan, in order."""
    optimization: dict[str, Any] = {}
    """The optimiser's report: every pass, nodes before and after, measured error."""
    data: dict[str, str] = {}
    """Digests of the calibration and evaluation data."""
    notes: tuple[str, ...] = ()
    """Warnings about the measurements."""
    metric: str = ""
    """The metric of the contract; empty in bundles of older versions."""
    metric_outputs: tuple[str, ...] = ()
    """The outputs that the metric judges."""
    metric_reason: str = ""
    """The reason for the metric."""
    metric_cut: float | None = None
    """The score above which a sample is of class 1, if the judged output has one score per sample. Otherwise, and in bundles of older
    versions, None."""
    max_output_error: float | None = 0.1
    """Maximum deviation of an output from the original's; None: unlimited."""
    prove_accuracy: bool = False
    """True if the maximum loss had to be proven at 95 % confidence."""
    trust_labels: bool = False
    """True if labels were accepted on which the original may be no better than chance."""
    seen_rows: int = 0
    """Number of evaluation rows that are also calibration or training rows."""

    @property
    def optimized(self) -> CandidateRecord | None:
        """The optimised graph in FP32 on the baseline's engine and threads. Its speed-up is the gain of graph optimisation."""
        before = self.baseline
        same = [one for one in self.candidates if (one.engine, one.threads) == (before.engine, before.threads)]
        exact = (one for one in same if one.precision == "fp32" and not one.compression)
        return next((one for one in exact if one.latency_ms is not None), None)

    @property
    def limit(self) -> float:
        """The maximum loss by the metric."""
        if self.metric != "fidelity":
            return self.max_accuracy_loss
        return math.inf if self.max_output_error is None else self.max_output_error

    @property
    def contract(self) -> str:
        """The contract on accuracy and the reason for its metric, as text."""
        proof = " with 95 % confidence" if self.prove_accuracy else ""
        if not self.metric:
            return f"at most {percent(self.max_accuracy_loss)} loss of accuracy{proof}"
        judged = ", ".join(f"'{name}'" for name in self.metric_outputs)
        most = f"at most {percent(self.limit)}" if math.isfinite(self.limit) else "any"
        others = ""
        if self.metric != "fidelity" and self.max_output_error is not None:
            others = f", and {percent(self.max_output_error, 0)} difference from the original"
        return f"{most} loss of {self.metric}{proof} in {judged} ({self.metric_reason}){others}"

    def candidate(self, name: str) -> CandidateRecord:
        """The record called ``name``; KeyError if there is none."""
        for record in (self.baseline, *self.candidates):
            if record.name == name:
                return record
        raise KeyError(name)
