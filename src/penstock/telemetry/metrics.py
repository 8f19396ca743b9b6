"""The metrics that there are: Triton's (``nv_*``) and ours (``penstock_*``). Every name is declared here, with what its value is.

Nothing is registered and nothing kept: ``exposition.py`` reads the values from the statistics of the models that there are, so the
series of an unloaded model are gone with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from penstock.telemetry.quantiles import RecentDurations, Window
from penstock.telemetry.statistics import BOUNDS_NS, FIRST_RESPONSE_BOUNDS_NS, ModelStatistics
from penstock.telemetry.usage import MachineUsage, ProcessUsage

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper bounds of the batch sizes' buckets."""

Number = int | float


class ServerFacts(msgspec.Struct):
    """What is known of a server process but not of a model."""

    version: str
    """Of Penstock."""
    started_s: float
    """When it started, in seconds since the epoch."""
    process: ProcessUsage = msgspec.field(default_factory=ProcessUsage)
    processes: int = 1
    loop_lag_s: float | None = None
    """How late the event loop was at worst since it was last asked."""
    connections: dict[str, int] = {}
    """Open connections by protocol."""
    inflight_bytes: int | None = None
    """Bytes of requests that are being worked on."""
    dropped_records: int = 0
    """Traces and lines of the access log that were lost."""


class Family(msgspec.Struct, frozen=True):
    """A metric as it is declared."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    label: str = ""
    """The label that tells its values apart, if its value is a mapping."""


Value = Number | Mapping[Any, Number] | None
"""A mapping has one series for each of its keys; what is None is left out."""

MODEL_VALUES: tuple[tuple[Family, Callable[[ModelStatistics], Value]], ...] = (
    (
        Family("nv_inference_request_success", "counter", "Requests answered, from the cache too"),
        lambda model: model.success.count,
    ),
    (
        Family("nv_inference_request_failure", "counter", "Requests that failed, by reason", "reason"),
        lambda model: model.failures,
    ),
    (
        Family("nv_inference_count", "counter", "Inferences computed, that is rows of batches"),
        lambda model: model.inference_count,
    ),
    (
        Family("nv_inference_exec_count", "counter", "Executions of the model, that is batches"),
        lambda model: model.execution_count,
    ),
    (
        Family(
            "nv_inference_request_duration_us", "counter", "Total duration of the requests answered, in microseconds"
        ),
        lambda model: model.success_ns // 1000,
    ),
    (
        Family(
            "nv_inference_queue_duration_us", "counter", "Total time that the requests answered waited, in microseconds"
        ),
        lambda model: model.queue_ns // 1000,
    ),
    (
        Family("nv_inference_compute_input_duration_us", "counter", "Total time of preparing inputs, in microseconds"),
        lambda model: model.compute_input_ns // 1000,
    ),
    (
        Family("nv_inference_compute_infer_duration_us", "counter", "Total time of running the model, in microseconds"),
        lambda model: model.compute_infer_ns // 1000,
    ),
    (
        Family(
            "nv_inference_compute_output_duration_us", "counter", "Total time of splitting outputs, in microseconds"
        ),
        lambda model: model.compute_output_ns // 1000,
    ),
    (
        Family("nv_inference_pending_request_count", "gauge", "Requests accepted and not yet answered"),
        lambda model: model.pending,
    ),
    (Family("nv_cache_num_hits_per_model", "counter", "Answers from the cache"), lambda model: model.hits.count),
    (
        Family("nv_cache_num_misses_per_model", "counter", "Requests that the cache could not answer"),
        lambda model: model.misses.count,
    ),
    (
        Family("nv_cache_hit_duration_per_model", "counter", "Total time of cache hits, in microseconds"),
        lambda model: model.hits.ns // 1000,
    ),
    (
        Family("nv_cache_miss_duration_per_model", "counter", "Total time of cache misses, in microseconds"),
        lambda model: model.misses.ns // 1000,
    ),
    (
        Family("nv_model_load_duration_secs", "gauge", "How long loading and warming up took, in seconds"),
        lambda model: model.load_s,
    ),
    (
        Family("penstock_batches_total", "counter", "Batches by why they left the queue", "reason"),
        lambda model: model.reasons,
    ),
    (
        Family("penstock_stages_total", "counter", "How often each stage of a Python model ran", "stage"),
        lambda model: {name: stage.count for name, stage in model.stages.items()},
    ),
    (
        Family("penstock_stage_seconds_total", "counter", "Time that each stage of a Python model took", "stage"),
        lambda model: {name: stage.ns / 1e9 for name, stage in model.stages.items()},
    ),
)

Buckets = tuple[Sequence[int], Number]
"""How many are in each bucket, the last of them without a bound, and the sum of all in the metric's unit."""


def _batch_sizes(model: ModelStatistics) -> Buckets:
    counts = [0] * (len(BATCH_SIZES) + 1)
    for rows, batch in model.batches.items():
        # 1 is in the first bucket, 2 in the second, 3 and 4 in the third, and so on
        counts[min((rows - 1).bit_length(), len(BATCH_SIZES))] += batch.count
    return counts, model.inference_count


MODEL_HISTOGRAMS: tuple[tuple[Family, Sequence[Number], Callable[[ModelStatistics], Buckets | None]], ...] = (
    (
        Family("penstock_request_duration_seconds", "histogram", "Requests answered, by duration"),
        tuple(bound / 1e9 for bound in BOUNDS_NS),
        lambda model: (model.request_buckets, model.success_ns / 1e9),
    ),
    (
        Family("penstock_queue_duration_seconds", "histogram", "Requests answered, by the time that they waited"),
        tuple(bound / 1e9 for bound in BOUNDS_NS),
        lambda model: (model.queue_buckets, model.queue_ns / 1e9),
    ),
    (
        Family(
            "penstock_compute_duration_seconds", "histogram", "Requests computed, by the time that their batch took"
        ),
        tuple(bound / 1e9 for bound in BOUNDS_NS),
        lambda model: (
            model.compute_buckets,
            (model.compute_input_ns + model.compute_infer_ns + model.compute_output_ns) / 1e9,
        ),
    ),
    (
        Family("penstock_batch_rows", "histogram", "Batches by their rows"),
        BATCH_SIZES,
        _batch_sizes,
    ),
    (
        Family(
            "nv_inference_first_response_histogram_ms",
            "histogram",
            "Requests of decoupled models by the time to the first response, in milliseconds",
        ),
        tuple(bound // 1_000_000 for bound in FIRST_RESPONSE_BOUNDS_NS),
        lambda model: (model.first_response_buckets, model.first_response.ns / 1e6) if model.decoupled else None,
    ),
)

Summary = tuple[Window, int, int]
"""The durations of the last minute, and how many there ever were and their sum in nanoseconds."""

MODEL_SUMMARIES: tuple[tuple[Family, Callable[[RecentDurations, ModelStatistics], Summary]], ...] = (
    (
        Family(
            "nv_inference_request_summary_us", "summary", "Durations of requests in the last minute, in microseconds"
        ),
        lambda recent, model: (recent.request, model.success.count, model.success_ns),
    ),
    (
        Family("nv_inference_queue_summary_us", "summary", "Waiting times in the last minute, in microseconds"),
        lambda recent, model: (recent.queue, model.success.count, model.queue_ns),
    ),
    (
        Family(
            "nv_inference_compute_input_summary_us", "summary", "Preparing inputs in the last minute, in microseconds"
        ),
        lambda recent, model: (recent.compute_input, model.computed_count, model.compute_input_ns),
    ),
    (
        Family(
            "nv_inference_compute_infer_summary_us", "summary", "Running the model in the last minute, in microseconds"
        ),
        lambda recent, model: (recent.compute_infer, model.computed_count, model.compute_infer_ns),
    ),
    (
        Family(
            "nv_inference_compute_output_summary_us", "summary", "Splitting outputs in the last minute, in microseconds"
        ),
        lambda recent, model: (recent.compute_output, model.computed_count, model.compute_output_ns),
    ),
    (
        Family("nv_cache_hit_summary_us", "summary", "Cache hits in the last minute, in microseconds"),
        lambda recent, model: (recent.cache_hit, model.hits.count, model.hits.ns),
    ),
    (
        Family("nv_cache_miss_summary_us", "summary", "Cache misses in the last minute, in microseconds"),
        lambda recent, model: (recent.cache_miss, model.misses.count, model.misses.ns),
    ),
)

SERVER_VALUES: tuple[tuple[Family, Callable[[ServerFacts], Value]], ...] = (
    (
        Family("penstock_build_info", "gauge", "Always 1; the label tells the version", "version"),
        lambda it: {it.version: 1},
    ),
    (
        Family("penstock_start_time_seconds", "gauge", "When the server started, in seconds since the epoch"),
        lambda it: it.started_s,
    ),
    (Family("penstock_processes", "gauge", "Processes of the server"), lambda it: it.processes),
    (
        Family("penstock_process_resident_memory_bytes", "gauge", "Memory that the processes hold"),
        lambda it: it.process.resident_bytes,
    ),
    (
        Family("penstock_process_cpu_seconds_total", "counter", "Processor time that the processes have used"),
        lambda it: it.process.cpu_s,
    ),
    (Family("penstock_process_open_fds", "gauge", "Open files and sockets"), lambda it: it.process.open_files),
    (
        Family(
            "penstock_event_loop_lag_seconds", "gauge", "How late the event loop was at worst since the last scrape"
        ),
        lambda it: it.loop_lag_s,
    ),
    (Family("penstock_connections", "gauge", "Open connections by protocol", "protocol"), lambda it: it.connections),
    (
        Family("penstock_inflight_bytes", "gauge", "Bytes of the requests that are being worked on"),
        lambda it: it.inflight_bytes,
    ),
    (
        Family("penstock_records_dropped_total", "counter", "Traces and lines of the access log that were lost"),
        lambda it: it.dropped_records,
    ),
)

MACHINE_VALUES: tuple[tuple[Family, Callable[[MachineUsage], Value]], ...] = (
    (Family("nv_cpu_utilization", "gauge", "Share of the machine's processor time in use, 0 to 1"), lambda it: it.cpu),
    (Family("nv_cpu_memory_total_bytes", "gauge", "Memory of the machine"), lambda it: it.memory_total_bytes),
    (
        Family("nv_cpu_memory_used_bytes", "gauge", "Memory of the machine that is in use"),
        lambda it: it.memory_used_bytes,
    ),
)

FAMILIES = (
    *(family for family, _ in MODEL_VALUES),
    *(family for family, _, _ in MODEL_HISTOGRAMS),
    *(family for family, _ in MODEL_SUMMARIES),
    *(family for family, _ in SERVER_VALUES),
    *(family for family, _ in MACHINE_VALUES),
)
"""Every metric that there is."""
