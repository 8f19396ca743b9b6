"""All metrics: Triton's (``nv_*``) and Penstock's (``penstock_*``), each with its name, help and value.

Values are not stored: ``exposition.py`` reads them from the statistics of the loaded models. When a model is unloaded, its series
therefore disappear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from penstock.telemetry.quantiles import RecentDurations, RecentWindow
from penstock.telemetry.statistics import BOUNDS_NS, FIRST_RESPONSE_BOUNDS_NS, ModelStatistics
from penstock.telemetry.usage import MachineUsage, ProcessUsage

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper bounds of the buckets for batch sizes."""

Number = int | float


class ServerFacts(msgspec.Struct):
    """Facts about a server process that do not belong to a model."""

    version: str
    """Version of Penstock."""
    started_s: float
    """Start time in seconds since the epoch."""
    process: ProcessUsage = msgspec.field(default_factory=ProcessUsage)
    processes: int = 1
    loop_lag_s: float | None = None
    """Largest delay of the event loop in seconds, since these facts were last read."""
    connections: dict[str, int] = {}
    """Open connections by protocol."""
    inflight_bytes: int | None = None
    """Bytes of all requests in progress."""
    dropped_records: int = 0
    """Number of lost traces and access log lines."""


class Family(msgspec.Struct, frozen=True):
    """Declaration of a metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    label: str = ""
    """Name of the label that distinguishes the series, if the value is a mapping."""


Value = Number | Mapping[Any, Number] | None
"""The value of a metric. A mapping yields one series per key. None yields no series."""

_Source = TypeVar("_Source")
_Declared = tuple[Family, Callable[[_Source], Value]]
_Values = tuple[_Declared[_Source], ...]


def _counter(name: str, help: str, value: Callable[[_Source], Value], label: str = "") -> _Declared[_Source]:
    return Family(name, "counter", help, label), value


def _gauge(name: str, help: str, value: Callable[[_Source], Value], label: str = "") -> _Declared[_Source]:
    return Family(name, "gauge", help, label), value


def _total_us(name: str, help: str, total_ns: Callable[[ModelStatistics], int]) -> _Declared[ModelStatistics]:
    return Family(name, "counter", f"{help}, in microseconds"), lambda model: total_ns(model) // 1000


MODEL_VALUES: _Values[ModelStatistics] = (
    _counter("nv_inference_request_success", "Requests answered, from the cache too", lambda it: it.success.count),
    _counter("nv_inference_request_failure", "Requests that failed, by reason", lambda it: it.failures, "reason"),
    _counter("nv_inference_count", "Number of inferences: the rows of all batches", lambda it: it.inference_count),
    _counter(
        "nv_inference_exec_count", "Number of executions of the model: the batches", lambda it: it.execution_count
    ),
    _total_us("nv_inference_request_duration_us", "Total duration of answered requests", lambda it: it.success_ns),
    _total_us(
        "nv_inference_queue_duration_us",
        "Total time that answered requests waited in the queue",
        lambda it: it.queue_ns,
    ),
    _total_us(
        "nv_inference_compute_input_duration_us", "Total time of preparing inputs", lambda it: it.compute_input_ns
    ),
    _total_us(
        "nv_inference_compute_infer_duration_us", "Total time of running the model", lambda it: it.compute_infer_ns
    ),
    _total_us(
        "nv_inference_compute_output_duration_us", "Total time of splitting outputs", lambda it: it.compute_output_ns
    ),
    _gauge("nv_inference_pending_request_count", "Requests accepted and not yet answered", lambda it: it.pending),
    _counter("nv_cache_num_hits_per_model", "Responses from the cache", lambda it: it.hits.count),
    _counter("nv_cache_num_misses_per_model", "Requests that the cache could not answer", lambda it: it.misses.count),
    _total_us("nv_cache_hit_duration_per_model", "Total time of cache hits", lambda it: it.hits.ns),
    _total_us("nv_cache_miss_duration_per_model", "Total time of cache misses", lambda it: it.misses.ns),
    _gauge("nv_model_load_duration_secs", "Time of loading and warming up, in seconds", lambda it: it.load_s),
    _counter(
        "penstock_batches_total", "Batches, by the reason why they left the queue", lambda it: it.reasons, "reason"
    ),
    _counter(
        "penstock_stages_total",
        "Number of runs of each stage of a Python model",
        lambda it: {name: stage.count for name, stage in it.stages.items()},
        "stage",
    ),
    _counter(
        "penstock_stage_seconds_total",
        "Total time of each stage, in seconds",
        lambda it: {name: stage.ns / 1e9 for name, stage in it.stages.items()},
        "stage",
    ),
)

Buckets = tuple[Sequence[int], Number]
"""The count of each bucket, and the sum of all values in the metric's unit. The last bucket has no upper bound."""


def _batch_sizes(model: ModelStatistics) -> Buckets:
    counts = [0] * (len(BATCH_SIZES) + 1)
    for rows, batch in model.batches.items():
        # 1 is in the first bucket, 2 in the second, 3 and 4 in the third, and so on
        counts[min((rows - 1).bit_length(), len(BATCH_SIZES))] += batch.count
    return counts, model.inference_count


MODEL_HISTOGRAMS: tuple[tuple[Family, Sequence[Number], Callable[[ModelStatistics], Buckets | None]], ...] = (
    (
        Family("penstock_request_duration_seconds", "histogram", "Durations of answered requests"),
        tuple(bound / 1e9 for bound in BOUNDS_NS),
        lambda model: (model.request_buckets, model.success_ns / 1e9),
    ),
    (
        Family("penstock_queue_duration_seconds", "histogram", "Times that answered requests waited in the queue"),
        tuple(bound / 1e9 for bound in BOUNDS_NS),
        lambda model: (model.queue_buckets, model.queue_ns / 1e9),
    ),
    (
        Family(
            "penstock_compute_duration_seconds",
            "histogram",
            "Compute times of executed requests, each the time of its whole batch",
        ),
        tuple(bound / 1e9 for bound in BOUNDS_NS),
        lambda model: (
            model.compute_buckets,
            (model.compute_input_ns + model.compute_infer_ns + model.compute_output_ns) / 1e9,
        ),
    ),
    (
        Family("penstock_batch_rows", "histogram", "Rows per batch"),
        BATCH_SIZES,
        _batch_sizes,
    ),
    (
        Family(
            "nv_inference_first_response_histogram_ms",
            "histogram",
            "Times to the first response of requests to decoupled models, in milliseconds",
        ),
        tuple(bound // 1_000_000 for bound in FIRST_RESPONSE_BOUNDS_NS),
        lambda model: (model.first_response_buckets, model.first_response.ns / 1e6) if model.decoupled else None,
    ),
)

Summary = tuple[RecentWindow, int, int]
"""The durations of the last minute, and the count and the sum in nanoseconds of all durations since the start."""

_SummaryOf = Callable[[RecentDurations, ModelStatistics], Summary]


def _summary(name: str, help: str, summary: _SummaryOf) -> tuple[Family, _SummaryOf]:
    return Family(name, "summary", f"{help} in the last minute, in microseconds"), summary


MODEL_SUMMARIES: tuple[tuple[Family, _SummaryOf], ...] = (
    _summary(
        "nv_inference_request_summary_us",
        "Durations of requests",
        lambda recent, it: (recent.request, it.success.count, it.success_ns),
    ),
    _summary(
        "nv_inference_queue_summary_us",
        "Waiting times",
        lambda recent, it: (recent.queue, it.success.count, it.queue_ns),
    ),
    _summary(
        "nv_inference_compute_input_summary_us",
        "Preparing inputs",
        lambda recent, it: (recent.compute_input, it.computed_count, it.compute_input_ns),
    ),
    _summary(
        "nv_inference_compute_infer_summary_us",
        "Running the model",
        lambda recent, it: (recent.compute_infer, it.computed_count, it.compute_infer_ns),
    ),
    _summary(
        "nv_inference_compute_output_summary_us",
        "Splitting outputs",
        lambda recent, it: (recent.compute_output, it.computed_count, it.compute_output_ns),
    ),
    _summary("nv_cache_hit_summary_us", "Cache hits", lambda recent, it: (recent.cache_hit, it.hits.count, it.hits.ns)),
    _summary(
        "nv_cache_miss_summary_us",
        "Cache misses",
        lambda recent, it: (recent.cache_miss, it.misses.count, it.misses.ns),
    ),
)

SERVER_VALUES: _Values[ServerFacts] = (
    _gauge("penstock_build_info", "Always 1, with the version of Penstock", lambda it: {it.version: 1}, "version"),
    _gauge(
        "penstock_start_time_seconds", "Time of the server's start, in seconds since the epoch", lambda it: it.started_s
    ),
    _gauge("penstock_processes", "Processes of the server", lambda it: it.processes),
    _gauge(
        "penstock_process_resident_memory_bytes", "Memory that the processes hold", lambda it: it.process.resident_bytes
    ),
    _counter(
        "penstock_process_cpu_seconds_total", "Processor time that the processes have used", lambda it: it.process.cpu_s
    ),
    _gauge("penstock_process_open_fds", "Open files and sockets", lambda it: it.process.open_files),
    _gauge(
        "penstock_event_loop_lag_seconds",
        "Maximum delay of the event loop since the last scrape",
        lambda it: it.loop_lag_s,
    ),
    _gauge(
        "penstock_connections",
        "Open connections by protocol, except to the metrics port",
        lambda it: it.connections,
        "protocol",
    ),
    _gauge("penstock_inflight_bytes", "Bytes of the requests in progress", lambda it: it.inflight_bytes),
    _counter(
        "penstock_records_dropped_total",
        "Traces and lines of the access log that were lost",
        lambda it: it.dropped_records,
    ),
)

MACHINE_VALUES: _Values[MachineUsage] = (
    _gauge("nv_cpu_utilization", "Fraction of the machine's processor time in use, 0 to 1", lambda it: it.cpu),
    _gauge("nv_cpu_memory_total_bytes", "Memory of the machine", lambda it: it.memory_total_bytes),
    _gauge("nv_cpu_memory_used_bytes", "Memory of the machine that is in use", lambda it: it.memory_used_bytes),
)

FAMILIES = (
    *(family for family, _ in MODEL_VALUES),
    *(family for family, _, _ in MODEL_HISTOGRAMS),
    *(family for family, _ in MODEL_SUMMARIES),
    *(family for family, _ in SERVER_VALUES),
    *(family for family, _ in MACHINE_VALUES),
)
"""All metrics."""
