"""Every number of the statistics, from batches whose times are known."""

from __future__ import annotations

import itertools
import time

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.telemetry.statistics import (
    BOUNDS_NS,
    MAX_RESPONSES,
    BatchTimes,
    Failure,
    ModelStatistics,
    Reason,
    ResponseKind,
    merge,
)

US = 1000
MS = 1000 * US
T = 7 * 10**15
"""An arbitrary time."""


def two_batches() -> ModelStatistics:
    statistics = ModelStatistics("m", "3")
    statistics.executed(
        [T, T + 10 * US], 5, Reason.IDLE, BatchTimes(T + 60 * US, T + 61 * US, T + 81 * US, T + 84 * US), T + 110 * US
    )
    statistics.executed([T], 1, Reason.FULL, BatchTimes(T + 1 * MS, T + 2 * MS, T + 5 * MS, T + 6 * MS), T + 7 * MS)
    return statistics


def test_two_batches_number_by_number() -> None:
    before = time.time_ns() // MS
    shown = two_batches().to_dict()
    assert before <= shown.pop("last_inference") <= time.time_ns() // MS
    assert shown == {
        "name": "m",
        "version": "3",
        "inference_count": 6,
        "execution_count": 2,
        "inference_stats": {
            "success": {"count": 3, "ns": (110 + 100 + 7000) * US},
            "fail": {"count": 0, "ns": 0},
            "queue": {"count": 3, "ns": (60 + 50 + 1000) * US},
            "compute_input": {"count": 3, "ns": (1 + 1 + 1000) * US},
            "compute_infer": {"count": 3, "ns": (20 + 20 + 3000) * US},
            "compute_output": {"count": 3, "ns": (3 + 3 + 1000) * US},
            "cache_hit": {"count": 0, "ns": 0},
            "cache_miss": {"count": 0, "ns": 0},
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": 1,
                "compute_input": {"count": 1, "ns": 1 * MS},
                "compute_infer": {"count": 1, "ns": 3 * MS},
                "compute_output": {"count": 1, "ns": 1 * MS},
            },
            {
                "batch_size": 5,
                "compute_input": {"count": 1, "ns": 1 * US},
                "compute_infer": {"count": 1, "ns": 20 * US},
                "compute_output": {"count": 1, "ns": 3 * US},
            },
        ],
        "memory_usage": [],
    }


def test_histograms_of_two_batches() -> None:
    statistics = two_batches()
    assert BOUNDS_NS[:8] == (50 * US, 100 * US, 250 * US, 500 * US, 1 * MS, 2500 * US, 5 * MS, 10 * MS)
    # 110 and 100 us, 7 ms; 60 and 50 us, 1 ms; twice 24 us, 5 ms: a bound belongs to the bucket below it
    assert statistics.request_buckets == [0, 1, 1, 0, 0, 0, 0, 1] + [0] * 11
    assert statistics.queue_buckets == [1, 1, 0, 0, 1] + [0] * 14
    assert statistics.compute_buckets == [2, 0, 0, 0, 0, 0, 1] + [0] * 12
    assert {reason: count for reason, count in statistics.reasons.items() if count} == {Reason.IDLE: 1, Reason.FULL: 1}


def test_what_takes_longer_than_the_last_bound_has_a_bucket() -> None:
    statistics = ModelStatistics()
    late = BOUNDS_NS[-1] + 1
    statistics.executed([T], 1, Reason.ALONE, BatchTimes(T + late, T + late, T + late, T + late), T + late)
    assert (statistics.request_buckets[-1], statistics.queue_buckets[-1], statistics.compute_buckets[0]) == (1, 1, 1)


def test_failures_add_to_fail_only() -> None:
    statistics = ModelStatistics()
    statistics.failed(Failure.REJECTED, T, T + 3)
    statistics.failed(Failure.REJECTED, T, T + 4)
    statistics.failed(Failure.BACKEND, T, T + 5)
    shown = statistics.to_dict()["inference_stats"]
    assert shown.pop("fail") == {"count": 3, "ns": 12}
    assert all(each == {"count": 0, "ns": 0} for each in shown.values())
    assert statistics.failures == {Failure.REJECTED: 2, Failure.CANCELED: 0, Failure.BACKEND: 1, Failure.OTHER: 0}
    assert not any(statistics.request_buckets)


def test_cache_hits_are_successes_that_nothing_computed() -> None:
    statistics = two_batches()
    statistics.cache_hit(T, 2 * US, T + 5 * US)
    statistics.cache_miss(4 * US)
    statistics.cache_miss(5 * US)
    shown = statistics.to_dict()
    assert (shown["inference_count"], shown["execution_count"]) == (6, 2)
    durations = shown["inference_stats"]
    assert durations["success"] == {"count": 4, "ns": (110 + 100 + 7000 + 5) * US}
    assert durations["queue"] == {"count": 4, "ns": (60 + 50 + 1000 + 3) * US}
    assert durations["compute_infer"] == {"count": 3, "ns": (20 + 20 + 3000) * US}
    assert durations["cache_hit"] == {"count": 1, "ns": 2 * US}
    assert durations["cache_miss"] == {"count": 2, "ns": 9 * US}
    assert sum(statistics.request_buckets) == sum(statistics.queue_buckets) == 4
    assert sum(statistics.compute_buckets) == 3


def test_responses_of_a_decoupled_model() -> None:
    statistics = ModelStatistics()
    statistics.responded(0, ResponseKind.SUCCESS, T, T + 10, output_ns=T + 7)
    statistics.responded(1, ResponseKind.EMPTY, T + 10, T + 12)
    statistics.responded(0, ResponseKind.FAIL, T, T + 4)
    statistics.responded(1, ResponseKind.CANCEL, T, T + 1)
    statistics.responded(MAX_RESPONSES, ResponseKind.SUCCESS, T, T + 1)
    nothing = {"count": 0, "ns": 0}
    assert statistics.to_dict()["response_stats"] == {
        "0": {
            "compute_infer": {"count": 2, "ns": 11},
            "compute_output": {"count": 1, "ns": 3},
            "success": {"count": 1, "ns": 10},
            "fail": {"count": 1, "ns": 4},
            "empty_response": nothing,
            "cancel": nothing,
        },
        "1": {
            "compute_infer": {"count": 1, "ns": 2},
            "compute_output": nothing,
            "success": nothing,
            "fail": nothing,
            "empty_response": {"count": 1, "ns": 2},
            "cancel": {"count": 1, "ns": 1},
        },
    }


def test_first_responses() -> None:
    statistics = ModelStatistics()
    for ms in (1, 100, 101, 2000, 6000):
        statistics.responded_first(T, T + ms * MS)
    assert statistics.first_response_buckets == [2, 1, 1, 0, 1]
    assert (statistics.first_response.count, statistics.first_response.ns) == (5, 8202 * MS)


batches = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2 * MS), min_size=1, max_size=9),  # arrivals, in any order
        st.lists(st.sampled_from([0, 1, 50 * US, 3 * MS, 40_000 * MS]), min_size=5, max_size=5),  # from stage to stage
        st.integers(1, 20),
        st.sampled_from(Reason),
    ),
    max_size=6,
)


def fed(given: list[tuple[list[int], list[int], int, Reason]]) -> ModelStatistics:
    statistics = ModelStatistics("m", "1", pending=len(given))
    for arrivals, steps, rows, reason in given:
        moments = [max(arrivals)]
        for step in steps:
            moments.append(moments[-1] + step)
        statistics.executed(
            [T + each for each in arrivals],
            rows,
            reason,
            BatchTimes(*(T + each for each in moments[1:5])),
            T + moments[5],
        )
    return statistics


@given(batches)
def test_histograms_agree_with_the_totals_and_with_counting_one_by_one(
    given: list[tuple[list[int], list[int], int, Reason]],
) -> None:
    statistics = fed(given)
    waited, took = [], []
    for arrivals, steps, _, _ in given:
        waited += [max(arrivals) - each + steps[0] for each in arrivals]
        took += [max(arrivals) - each + sum(steps) for each in arrivals]
    for buckets, durations, total in (
        (statistics.queue_buckets, waited, statistics.queue_ns),
        (statistics.request_buckets, took, statistics.success.ns),
    ):
        assert total == sum(durations)
        edges = (-1, *BOUNDS_NS, 10**18)
        assert buckets == [sum(low < each <= high for each in durations) for low, high in itertools.pairwise(edges)]


@given(st.lists(batches, min_size=1, max_size=4))
def test_merged_statistics_are_those_of_one_process_that_did_it_all(
    given: list[list[tuple[list[int], list[int], int, Reason]]],
) -> None:
    parts = [fed(each) for each in given]
    whole = fed([batch for each in given for batch in each])
    whole.last_inference_ns = max(each.last_inference_ns for each in parts)
    kept = [part.snapshot() for part in parts]
    assert merge([[part] for part in parts]) == [whole]
    assert parts == kept


def test_merging_sums_everything_but_moments_and_names() -> None:
    one, other = two_batches(), two_batches()
    one.last_inference_ns, other.last_inference_ns = 5, 4
    one.load_s, other.load_s = 0.5, 2.0
    one.pending, other.pending = 2, 3
    for each in (one, other):
        each.failed(Failure.CANCELED, T, T + 1)
        each.cache_hit(T, 1, T + 2)
        each.cache_miss(1)
    other.responded(1, ResponseKind.SUCCESS, T, T + 1)
    other.responded_first(T, T + 1)
    stranger = ModelStatistics("a", "1")
    first, merged = merge([[one], [stranger, other]])
    assert first == stranger
    assert first is not stranger
    assert (merged.name, merged.version) == ("m", "3")
    assert (merged.last_inference_ns, merged.load_s, merged.pending) == (5, 2.0, 5)
    assert merged.success.count == 8
    assert merged.failures[Failure.CANCELED] == 2
    assert merged.batches[5].count == 2
    assert merged.responses == other.responses
    assert merged.first_response == other.first_response


def test_a_snapshot_is_independent_and_crosses_processes() -> None:
    statistics = two_batches()
    statistics.responded(0, ResponseKind.SUCCESS, T, T + 1)
    copy = statistics.snapshot()
    assert copy == statistics
    for encode, decode in (
        (msgspec.msgpack.encode, msgspec.msgpack.decode),
        (msgspec.json.encode, msgspec.json.decode),
    ):
        assert decode(encode(statistics), type=ModelStatistics) == copy
    statistics.executed([T], 5, Reason.IDLE, BatchTimes(T, T, T, T), T)
    statistics.responded(0, ResponseKind.SUCCESS, T, T + 1)
    assert copy.batches[5].count == 1
    assert copy.responses[0].answers[ResponseKind.SUCCESS].count == 1
