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
    """The candidate's loss of accuracy, with its 95 % interval: the difference between the values of original and candidate.
    For errors without a scale, such as mae, the difference is divided by the original's value."""
    relative_error: float
    """Norm of the difference from the original's output, divided by the norm of that output; the maximum of all outputs."""
    samples: int
    bound: float | None = None
    """Upper bound of the loss at 95 % confidence; None in bundles of older versions."""
    spread: float = 0.0
    """Standard deviation of the loss per sample if the metric is a mean over samples; otherwise 0."""
    lost: int = 0
    won: int = 0
    """Number of samples that only the original (``lost``) or only the candidate (``won``) gets right; 0 for other kinds of metrics."""
    looks: int = 1
    """Number of candidates whose intervals and bounds are all valid together at 95 % confidence."""
    unjudged_output: str = ""
    """The output that differs most from the original's, among outputs whose differences the loss does not bound; empty if there is
    none."""
    unjudged_error: float = 0.0
    """Deviation of ``unjudged_output``: the fraction of changed classes, or the error relative to the original output's spread."""
    broken: str = ""
    """Where the outputs have NaN or infinity, as text; empty if all values are finite. If not empty, the other fields are invalid."""
    is_share: bool = True
    """True if ``value`` is displayed in per cent."""

    @property
    def shown(self) -> str:
        """``value``, formatted for display."""
        return self.show(self.value)

    def show(self, value: float) -> str:
        """Format a value of the metric for display."""
        return f"{value:.2%}" if self.is_share else f"{value:.4g}"

    @property
    def level(self) -> float:
        """Accuracy on a scale whose best value is 1: ``value`` if ``is_share``, otherwise 1 minus the loss."""
        return self.value if self.is_share else 1 - self.loss.value


class SizeGain(msgspec.Struct, frozen=True):
    """The speed of the original and of the chosen candidate at one size of the evaluation samples."""

    shapes: dict[str, tuple[int, ...]]
    """The shapes of the inputs of the timed call."""
    share: float
    """Fraction of the evaluation samples for which this size stands."""
    original_ms: float
    chosen_ms: float
    """Median latencies of one call, in milliseconds."""
    speedup: Interval

    @property
    def title(self) -> str:
        """The shapes of the inputs, as text: ``x 1×3×224×224, length scalar``."""
        return ", ".join(f"{name} {'×'.join(map(str, shape)) or 'scalar'}" for name, shape in self.shapes.items())


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
    """Size as a coded model, in bytes; 0 if the model is not coded."""
    batch: int = 1
    """The batch size with the highest throughput within the contract; measured only for finalists."""
    latency_ms: float | None = None
    p99_ms: float | None = None
    calls: int = 0
    """Number of timed calls from which the latencies were computed."""
    speedup: Interval | None = None
    """Speed-up over the original with the same number of threads, with its 95 % interval. The two are timed in turns."""
    accuracy: Accuracy | None = None
    rows_per_second: float | None = None
    """Throughput at ``batch``."""
    busy: str = ""
    """Other processes that disturbed the candidate's timings, as text; empty if there were none, and in bundles of older versions."""

    @property
    def disk_bytes(self) -> int:
        """Size in a bundle, in bytes."""
        return self.stored_bytes or self.size_bytes


class Attempt(msgspec.Struct, frozen=True):
    """One step of a compression plan and its result, compared with the original on held-out samples."""

    name: str
    parent: str
    """The attempt that produced the input of this step; empty if the input is the original model."""
    outcome: Literal["kept", "rejected", "failed", "skipped"]
    reason: str
    accuracy: Accuracy | None = None
    speedup: Interval | None = None
    size_bytes: int = 0
    stored_bytes: int = 0
    """Size as a coded model, in bytes; 0 if the model is not coded."""
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
    """Profile of the original by batch size. Calls of the original and of the chosen variant were interleaved."""
    rows_per_call: int = 1
    """Number of rows per call when the candidates were timed and judged."""
    attempts: tuple[Attempt, ...] = ()
    """The attempts of a compression plan, in order."""
    optimization: dict[str, Any] = {}
    """The optimiser's report: for every pass, the number of nodes before and after it, and the measured error."""
    data: dict[str, str] = {}
    """Digests of the calibration and evaluation data."""
    notes: tuple[str, ...] = ()
    """Warnings about the measurements."""
    metric: str = ""
    """The metric of the contract; empty in bundles of older versions."""
    metric_outputs: tuple[str, ...] = ()
    """The outputs that the metric judges."""
    metric_reason: str = ""
    """Why this metric was chosen."""
    metric_cut: float | None = None
    """The score above which a sample is of class 1, if the judged output has one score per sample. Otherwise, and in bundles of older
    versions, None."""
    max_output_error: float | None = 0.1
    """Maximum deviation of an output from the original's; None: unlimited."""
    prove_accuracy: bool = False
    """True if the maximum loss had to be proven at 95 % confidence."""
    trust_labels: bool = False
    """True if the build accepted labels on which the original may be no better than chance."""
    seen_rows: int = 0
    """Number of evaluation rows that are also calibration or training rows."""
    synthetic: int = 0
    """Number of synthetic samples on which the candidates were judged; 0 if the user gave the data."""
    by_size: tuple[SizeGain, ...] = ()
    """The gain at each size, if the evaluation samples have several sizes. Latencies of candidates are then means over the sizes,
    weighted by how often each occurs."""

    @property
    def optimized(self) -> CandidateRecord | None:
        """The optimised FP32 graph, with the baseline's engine and threads. Its speed-up shows the gain of graph optimisation."""
        before = self.baseline
        same = [one for one in self.candidates if (one.engine, one.threads) == (before.engine, before.threads)]
        exact = (one for one in same if one.precision == "fp32" and not one.compression)
        return next((one for one in exact if one.latency_ms is not None), None)

    @property
    def limit(self) -> float:
        """The maximum loss for the metric."""
        if self.metric != "fidelity":
            return self.max_accuracy_loss
        return math.inf if self.max_output_error is None else self.max_output_error

    @property
    def contract(self) -> str:
        """The accuracy limits of the contract, and why the metric was chosen, as text."""
        proof = " with 95 % confidence" if self.prove_accuracy else ""
        made = "; judged on synthetic samples, so only fidelity to the original is known" if self.synthetic else ""
        if not self.metric:
            return f"at most {percent(self.max_accuracy_loss)} loss of accuracy{proof}{made}"
        judged = ", ".join(f"'{name}'" for name in self.metric_outputs)
        most = f"at most {percent(self.limit)}" if math.isfinite(self.limit) else "any"
        others = ""
        if self.metric != "fidelity" and self.max_output_error is not None:
            others = f", and {percent(self.max_output_error, 0)} difference from the original"
        return f"{most} loss of {self.metric}{proof} in {judged} ({self.metric_reason}){others}{made}"

    @property
    def tried(self) -> str:
        """The number of candidates and, if some were not, how many were timed. The original is no candidate."""
        made = [one for one in self.candidates if one.status != "baseline"]
        timed = sum(one.latency_ms is not None for one in made)
        count = f"{len(made)} candidate{'s' if len(made) != 1 else ''}"
        return count if timed == len(made) else f"{count}, of which {timed} were timed,"

    def disturbance(self, record: CandidateRecord) -> str:
        """Why the timings of ``record`` are unreliable, as text; empty if they were not disturbed."""
        if record.latency_ms is None:
            return ""
        # A bundle of an older version, or a disturbance that concerns all timings.
        is_general = not any(one.busy for one in (self.baseline, *self.candidates))
        return self.conditions.disturbance if is_general else record.busy

    def candidate(self, name: str) -> CandidateRecord:
        """The record called ``name``; KeyError if there is none."""
        for record in (self.baseline, *self.candidates):
            if record.name == name:
                return record
        raise KeyError(name)
