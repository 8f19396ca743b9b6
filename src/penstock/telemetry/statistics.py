"""Statistics of the requests of one model version: exact counts and durations, cheap enough for every request.

The figures follow the statistics extension of the Open Inference Protocol, as in Triton. Penstock adds histograms, the reasons why
batches left the queue, and the reasons why requests failed. Counting a batch takes a constant time, plus two look-ups for each of
its requests.

A ``ModelStatistics`` is plain data, which msgspec can encode. ``merge`` adds the statistics of several processes.
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, Self, TypeVar

import msgspec

from penstock.errors import Code, PenstockError
from penstock.telemetry.quantiles import RecentDurations

_BOUNDS_US = (50, 100, 250, 500, 1e3, 2.5e3, 5e3, 10e3, 25e3, 50e3, 100e3, 250e3, 500e3, 1e6, 2.5e6, 5e6, 10e6, 30e6)
BOUNDS_NS = tuple(int(microseconds * 1000) for microseconds in _BOUNDS_US)
"""Inclusive upper bounds of the histograms' buckets. One more bucket counts durations above the last bound."""

FIRST_RESPONSE_BOUNDS_NS = (100_000_000, 500_000_000, 2_000_000_000, 5_000_000_000)
"""Upper bounds of the buckets for the time to a first response, as in Triton: 100, 500, 2000 and 5000 ms."""

MAX_RESPONSES = 1024
"""Maximum number of responses per request that are counted in ``responses``."""


class Reason(enum.StrEnum):
    """The reason why a batch left the queue."""

    FULL = "full"
    """The batch had the maximum number of rows, or the next request did not fit into it."""
    PREFERRED = "preferred"
    """The batch had a preferred size."""
    DELAY = "delay"
    """The longest-waiting request of the batch had waited for the configured delay."""
    IDLE = "idle"
    """An instance was free and no delay is configured."""
    ALONE = "alone"
    """The request runs alone, because the model's requests cannot be merged, it is larger than a batch, or its batch has failed."""


class Failure(enum.StrEnum):
    """The reason why a request failed, by Triton's names."""

    REJECTED = "REJECTED"
    """The request was rejected: a queue or limit was full, the queue timeout passed, or the deadline could not be met."""
    CANCELED = "CANCELED"
    """The client disconnected or cancelled the request."""
    BACKEND = "BACKEND"
    """The model failed."""
    OTHER = "OTHER"

    @classmethod
    def of(cls, error: PenstockError) -> Failure:
        """The reason that ``error`` implies. Callers may know a more precise reason."""
        return _FAILURES.get(error.code, cls.OTHER)


_FAILURES = {Code.CANCELLED: Failure.CANCELED, Code.INTERNAL: Failure.BACKEND} | dict.fromkeys(
    (Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE), Failure.REJECTED
)


class ResponseKind(enum.StrEnum):
    """Kind of one response of a decoupled model."""

    SUCCESS = "success"
    FAIL = "fail"
    EMPTY = "empty_response"
    CANCEL = "cancel"


class BatchTimes(msgspec.Struct):
    """Times at which a batch completed each stage: ``time.monotonic_ns`` on the instance's thread."""

    taken_ns: int
    """Time when the batch left the queue."""
    merged_ns: int
    """Time when the inputs were merged."""
    ran_ns: int
    """Time when the model's outputs were ready."""
    split_ns: int
    """Time when the outputs were split."""


Executed = tuple[Sequence[int], int, Reason, BatchTimes, int]
"""The arguments of ``ModelStatistics.executed``."""


@dataclass(slots=True)
class Duration:
    """A count and a total duration."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns


@dataclass(slots=True)
class OwnMetric:
    """A metric defined by a Python model."""

    kind: Literal["counter", "gauge"]
    help: str
    values: dict[str, float] = field(default_factory=dict)
    """Values by labels, in the form of the metrics page."""


@dataclass(slots=True)
class BatchStatistics:
    """Statistics of the batches of one size. Durations are counted once per batch."""

    count: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0


@dataclass(slots=True)
class ResponseStatistics:
    """Statistics of the n-th response to each request of a decoupled model."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    answers: dict[ResponseKind, Duration] = field(default_factory=lambda: {kind: Duration() for kind in ResponseKind})


def _buckets() -> list[int]:
    return [0] * (len(BOUNDS_NS) + 1)


@dataclass(slots=True)
class ModelStatistics:
    """Statistics of one model version; used only on the event loop. All times are ``time.monotonic_ns``, all durations nanoseconds.

    Derived numbers are properties, so that they take no time per request. The class is a dataclass because setting its attributes
    takes half as long as for a msgspec.Struct.
    """

    name: str = ""
    version: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    """Additional labels of the model's metrics."""
    decoupled: bool = False
    """True if the model may send any number of responses to a request."""
    pending: int = 0
    """Requests accepted and not yet answered; maintained by the scheduler."""
    last_inference_ns: int = 0
    """Time of the last answered batch, since the epoch."""
    success_ns: int = 0
    """Total duration of all successful requests."""
    fail: Duration = field(default_factory=Duration)
    queue_ns: int = 0
    """Total of all successful requests. The next three fields exclude cache hits and count the whole batch for each request."""
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    hits: Duration = field(default_factory=Duration)
    """Responses from the cache, and the total time of their look-ups."""
    misses: Duration = field(default_factory=Duration)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    """Statistics of batches, by number of rows."""
    reasons: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    """Number of batches, by the reason why they left the queue."""
    failures: dict[Failure, int] = field(default_factory=lambda: dict.fromkeys(Failure, 0))
    responses: dict[int, ResponseStatistics] = field(default_factory=dict)
    """Statistics of responses, by the response's number within its request. Only for decoupled models."""
    request_buckets: list[int] = field(default_factory=_buckets)
    """Number of successful requests by duration, in the buckets of ``BOUNDS_NS``."""
    queue_buckets: list[int] = field(default_factory=_buckets)
    """Number of successful requests by time in the queue."""
    compute_buckets: list[int] = field(default_factory=_buckets)
    """Number of successful requests without cache hits, by the total compute time of their batch (input, infer and output)."""
    first_response: Duration = field(default_factory=Duration)
    first_response_buckets: list[int] = field(default_factory=lambda: [0] * (len(FIRST_RESPONSE_BOUNDS_NS) + 1))
    """Number of requests by time to the first response, in the buckets of ``FIRST_RESPONSE_BOUNDS_NS``."""
    metrics: dict[str, OwnMetric] = field(default_factory=dict)
    """Metrics defined by a Python model, by name."""
    stages: dict[str, Duration] = field(default_factory=dict)
    """Duration of each stage of a Python model, by name. Some stages are part of every execution. The model may define others."""
    load_s: float = 0.0
    """Seconds of loading and warming up."""
    recent: RecentDurations | None = None
    """Quantiles of the last minute. None unless enabled, because they take time in every request."""

    def executed(self, arrived_ns: Sequence[int], rows: int, reason: Reason, times: BatchTimes, done_ns: int) -> None:
        """Count one batch of ``rows`` rows. Its requests, at least one, arrived at ``arrived_ns`` and ended at ``done_ns``."""
        self.executed_all([(arrived_ns, rows, reason, times, done_ns)])

    def executed_all(self, batches: Sequence[Executed]) -> None:
        """Count one or more batches, in the order in which they were answered."""
        all_input_ns = all_infer_ns = all_output_ns = all_waited_ns = all_took_ns = 0
        reasons, sizes = self.reasons, self.batches
        waiting, taking, computing = self.queue_buckets, self.request_buckets, self.compute_buckets
        for arrived_ns, rows, reason, times, done_ns in batches:
            taken_ns, merged_ns, ran_ns, split_ns = times.taken_ns, times.merged_ns, times.ran_ns, times.split_ns
            input_ns, infer_ns, output_ns = merged_ns - taken_ns, ran_ns - merged_ns, split_ns - ran_ns
            batch = sizes.get(rows)
            if batch is None:
                batch = sizes[rows] = BatchStatistics()
            batch.count += 1
            batch.compute_input_ns += input_ns
            batch.compute_infer_ns += infer_ns
            batch.compute_output_ns += output_ns
            reasons[reason] += 1
            count = len(arrived_ns)
            computing[bisect_left(BOUNDS_NS, split_ns - taken_ns)] += count
            if count == 1:
                waited_ns, took_ns = taken_ns - arrived_ns[0], done_ns - arrived_ns[0]
                waiting[bisect_left(BOUNDS_NS, waited_ns)] += 1
                taking[bisect_left(BOUNDS_NS, took_ns)] += 1
            else:
                arrived = sum(arrived_ns)
                waited_ns, took_ns = count * taken_ns - arrived, count * done_ns - arrived
                first, last = min(arrived_ns), max(arrived_ns)
                _observe(waiting, arrived_ns, first, last, taken_ns)
                _observe(taking, arrived_ns, first, last, done_ns)
            all_input_ns += count * input_ns
            all_infer_ns += count * infer_ns
            all_output_ns += count * output_ns
            all_waited_ns += waited_ns
            all_took_ns += took_ns
            if self.recent is not None:
                self.recent.executed(arrived_ns, taken_ns, (input_ns, infer_ns, output_ns), done_ns)
        self.compute_input_ns += all_input_ns
        self.compute_infer_ns += all_infer_ns
        self.compute_output_ns += all_output_ns
        self.queue_ns += all_waited_ns
        self.success_ns += all_took_ns
        self.last_inference_ns = time.time_ns() - max(0, time.monotonic_ns() - done_ns)

    def failed(self, reason: Failure, arrived_ns: int, now_ns: int) -> None:
        """Count one request that ended with an error."""
        self.fail.add(now_ns - arrived_ns)
        self.failures[reason] += 1

    def cache_hit(self, arrived_ns: int, lookup_ns: int, now_ns: int) -> None:
        """Count one request answered from the cache at ``now_ns``. The time before the look-up counts as queueing."""
        total_ns = now_ns - arrived_ns
        waited_ns = max(0, total_ns - lookup_ns)
        self.success_ns += total_ns
        self.queue_ns += waited_ns
        self.hits.add(lookup_ns)
        self.request_buckets[bisect_left(BOUNDS_NS, total_ns)] += 1
        self.queue_buckets[bisect_left(BOUNDS_NS, waited_ns)] += 1
        if self.recent is not None:
            self.recent.request.add(total_ns, 1, now_ns)
            self.recent.queue.add(waited_ns, 1, now_ns)
            self.recent.cache_hit.add(lookup_ns, 1, now_ns)

    def cache_miss(self, lookup_ns: int) -> None:
        """Count one cache miss. ``lookup_ns`` includes the time to store the response, if known."""
        self.misses.add(lookup_ns)
        if self.recent is not None:
            self.recent.cache_miss.add(lookup_ns, 1, time.monotonic_ns())

    def responded(self, number: int, kind: ResponseKind, started_ns: int, now_ns: int, output_ns: int = 0) -> None:
        """Count the response ``number`` (from 0) to a request of a decoupled model.

        The model began the response at ``started_ns`` and its outputs at ``output_ns`` (0: no outputs).
        """
        if number >= MAX_RESPONSES:
            return
        response = self.responses.get(number)
        if response is None:
            response = self.responses[number] = ResponseStatistics()
        if kind is not ResponseKind.CANCEL:
            response.compute_infer.add((output_ns or now_ns) - started_ns)
        if output_ns:
            response.compute_output.add(now_ns - output_ns)
        response.answers[kind].add(now_ns - started_ns)

    def responded_first(self, arrived_ns: int, now_ns: int) -> None:
        """Count the first response to a request of a decoupled model."""
        self.first_response.add(now_ns - arrived_ns)
        self.first_response_buckets[bisect_left(FIRST_RESPONSE_BOUNDS_NS, now_ns - arrived_ns)] += 1

    @property
    def success(self) -> Duration:
        """Requests answered, by the model or from the cache."""
        return Duration(sum(self.request_buckets), self.success_ns)

    @property
    def inference_count(self) -> int:
        """Rows that the model computed."""
        return sum(rows * batch.count for rows, batch in self.batches.items())

    @property
    def execution_count(self) -> int:
        """Batches that the model computed."""
        return sum(self.reasons.values())

    @property
    def computed_count(self) -> int:
        """Requests answered by the model, not from the cache."""
        return sum(self.compute_buckets)

    def snapshot(self) -> Self:
        """An independent copy."""
        return msgspec.convert(msgspec.to_builtins(self), type(self))

    def to_dict(self) -> dict[str, Any]:
        """The statistics in the JSON form of the protocol, as an entry of ``model_stats``."""
        success = self.success
        stages = {name: _entry(stage.count, stage.ns) for name, stage in sorted(self.stages.items())}
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": self.last_inference_ns // 1_000_000,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": _entry(success.count, success.ns),
                "fail": _entry(self.fail.count, self.fail.ns),
                "queue": _entry(success.count, self.queue_ns),
                **_compute(self, self.computed_count),
                "cache_hit": _entry(self.hits.count, self.hits.ns),
                "cache_miss": _entry(self.misses.count, self.misses.ns),
            },
            "response_stats": {str(number): _response(self.responses[number]) for number in sorted(self.responses)},
            "batch_stats": [
                {"batch_size": rows, **_compute(batch, batch.count)} for rows, batch in sorted(self.batches.items())
            ],
            "memory_usage": [],
            **({"stage_stats": stages} if stages else {}),
        }


def merge(processes: Iterable[Iterable[ModelStatistics]]) -> list[ModelStatistics]:
    """Merge the statistics of several processes, sorted by name and version. Numbers are added, except for the time of the last
    inference (the latest is kept) and the load duration (the longest is kept). The arguments are not changed.
    """
    merged: dict[tuple[str, str], ModelStatistics] = {}
    for process in processes:
        for one in process:
            key = one.name, one.version
            merged[key] = _add_models(merged[key], one) if key in merged else one.snapshot()
    return [merged[key] for key in sorted(merged)]


def _add_models(one: ModelStatistics, other: ModelStatistics) -> ModelStatistics:
    total = add_numbers(one, other)
    total.last_inference_ns = max(one.last_inference_ns, other.last_inference_ns)
    total.load_s = max(one.load_s, other.load_s)
    return total


_Data = TypeVar("_Data")


def add_numbers(one: _Data, other: _Data) -> _Data:
    """Add two values of the same structure, number by number. Values other than numbers are taken from ``one``."""
    result: Any
    if isinstance(one, msgspec.Struct) or (is_dataclass(one) and not isinstance(one, type)):
        names = [each.name for each in (fields(one) if is_dataclass(one) else msgspec.structs.fields(one))]
        result = type(one)(*(add_numbers(getattr(one, name), getattr(other, name)) for name in names))
    elif isinstance(one, dict) and isinstance(other, dict):
        result = one | other
        result |= {key: add_numbers(one[key], other[key]) for key in one.keys() & other.keys()}
    elif isinstance(one, list) and isinstance(other, list):
        result = [add_numbers(*pair) for pair in zip(one, other, strict=True)]
    elif one is None or other is None:
        result = other if one is None else one
    elif isinstance(one, str | bool):
        result = one
    else:
        result = one + other  # type: ignore[operator]
    return result  # type: ignore[no-any-return]


def _observe(buckets: list[int], starts: Sequence[int], first: int, last: int, end: int) -> None:
    """Count the duration from each of ``starts`` to ``end``. ``first`` is the earliest start, and ``last`` is the latest."""
    bucket = bisect_left(BOUNDS_NS, end - last)
    if bucket == bisect_left(BOUNDS_NS, end - first):
        buckets[bucket] += len(starts)  # requests of a batch arrive close together, so usually all belong to one bucket
        return
    for start in starts:
        buckets[bisect_left(BOUNDS_NS, end - start)] += 1


def _entry(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}


def _compute(totals: ModelStatistics | BatchStatistics, count: int) -> dict[str, dict[str, int]]:
    return {
        "compute_input": _entry(count, totals.compute_input_ns),
        "compute_infer": _entry(count, totals.compute_infer_ns),
        "compute_output": _entry(count, totals.compute_output_ns),
    }


def _response(response: ResponseStatistics) -> dict[str, dict[str, int]]:
    return {
        "compute_infer": _entry(response.compute_infer.count, response.compute_infer.ns),
        "compute_output": _entry(response.compute_output.count, response.compute_output.ns),
        **{kind.value: _entry(total.count, total.ns) for kind, total in response.answers.items()},
    }
