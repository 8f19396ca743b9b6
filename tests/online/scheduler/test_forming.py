from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.forming import Batch, Rules, Wait, form
from penstock.online.scheduler.latency_model import LatencyModel
from penstock.online.scheduler.queue import NEVER, Pending
from penstock.request import InferRequest
from penstock.telemetry.statistics import Reason

MS = 1_000_000


class Nobody:
    def cancel(self, pending: Pending) -> None:
        raise AssertionError("nobody cancels")


def make_pending(number: int, rows: int = 1, arrived_ns: int = 0, deadline_ns: int = NEVER) -> Pending:
    pending = Pending(Nobody(), number, InferRequest("m", {}), rows, None, lambda outcome: None, arrived_ns)
    pending.deadline_ns = pending.expires_ns = deadline_ns
    return pending


def make_line(rows: Sequence[int], arrived_ns: Sequence[int] = (), deadline_ns: int = NEVER) -> list[Pending]:
    arrived = list(arrived_ns) or [0] * len(rows)
    return [make_pending(n, r, a, deadline_ns) for n, (r, a) in enumerate(zip(rows, arrived, strict=True))]


def rules(max_batch: int, preferred: tuple[int, ...] = (), delay_us: int = 0) -> Rules:
    return Rules.of(
        BatchingConfig(
            batchable=True,
            max_batch=max_batch,
            max_queue=64,
            preferred_batch_size=preferred,
            max_queue_delay_microseconds=delay_us,
        )
    )


def oracle(line: list[Pending], now_ns: int, max_batch: int, preferred: set[int], delay_ns: int) -> int | None:
    """The number of requests that leave by the rules in Triton's documentation and source, checked one after another; None: wait."""
    preferred = preferred or {max_batch}
    sizes = [sum(pending.rows for pending in line[: count + 1]) for count in range(len(line))]
    fitting = [count for count, size in enumerate(sizes, start=1) if size <= max_batch or count == 1]
    longest = fitting[-1]
    exceeded = delay_ns > 0 and now_ns - min(pending.arrived_ns for pending in line[:longest]) >= delay_ns
    if exceeded:
        return longest
    of_preferred_size = [count for count in fitting if sizes[count - 1] in preferred]
    below_the_largest = [count for count in range(1, len(line)) if sizes[count] > max(preferred) and count <= longest]
    if of_preferred_size:
        first_over = below_the_largest[0] if below_the_largest else None
        if first_over is not None and not any(count <= first_over for count in of_preferred_size):
            # Nothing preferred was met before the largest preferred size was overstepped: that point counts, unless one follows.
            return max(first_over, *of_preferred_size)
        return of_preferred_size[-1]
    if below_the_largest:
        return below_the_largest[0]
    if longest < len(line) or sizes[longest - 1] >= max(preferred) or not delay_ns:
        return longest
    return None


@settings(max_examples=1000)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=14),
    st.integers(1, 8),
    st.sets(st.integers(1, 8), max_size=3),
    st.sampled_from([0, 0, 5, 15]),
)
def test_batches_leave_by_tritons_rules(
    arrivals: list[tuple[int, int]], max_batch: int, preferred: set[int], delay_us: int
) -> None:
    preferred = {size for size in preferred if size <= max_batch}
    line = make_line([rows for rows, _ in arrivals], [1000 * at for _, at in arrivals])
    formed = form([line], 20_000, rules(max_batch, tuple(preferred), delay_us), None)
    expected = oracle(line, 20_000, max_batch, preferred, 1000 * delay_us)
    if expected is None:
        assert isinstance(formed, Wait)
        assert formed.until_ns == min(pending.arrived_ns for pending in line) + 1000 * delay_us
    else:
        assert isinstance(formed, Batch)
        assert formed.requests == line[:expected]
        assert formed.rows == sum(pending.rows for pending in line[:expected])
        assert formed.rows <= max_batch or expected == 1


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(1, 10))
def test_natural_batching_takes_what_fits_in_order(rows: list[int], max_batch: int) -> None:
    line = make_line(rows)
    while line:
        batch = form([line], 0, rules(max_batch))
        assert isinstance(batch, Batch)
        count = len(batch.requests)
        assert batch.requests == line[:count]
        assert count == 1 or batch.rows <= max_batch
        rest = line[count:]
        assert not rest or batch.rows + rest[0].rows > max_batch
        line = rest


@pytest.mark.parametrize(
    ("rows", "preferred", "delay_us", "now_us", "expected"),
    [
        ([1, 1], (), 0, 0, Reason.IDLE),
        ([4, 4], (), 0, 0, Reason.FULL),
        ([5, 5], (), 0, 0, Reason.FULL),
        ([9], (), 0, 0, Reason.ALONE),
        ([2, 2, 1], (4,), 0, 0, Reason.PREFERRED),
        ([3, 3], (4,), 0, 0, Reason.FULL),
        ([1, 1], (), 100, 100, Reason.DELAY),
    ],
)
def test_a_batch_says_why_it_leaves(
    rows: list[int], preferred: tuple[int, ...], delay_us: int, now_us: int, expected: Reason
) -> None:
    formed = form([make_line(rows)], 1000 * now_us, rules(8, preferred, delay_us))
    assert isinstance(formed, Batch)
    assert formed.reason is expected


def test_what_cannot_be_merged_leaves_alone() -> None:
    formed = form([make_line([1, 1])], 0, Rules.of(BatchingConfig(batchable=False)))
    assert isinstance(formed, Batch)
    assert (len(formed.requests), formed.reason) == (1, Reason.ALONE)


def test_a_line_that_waits_does_not_hold_up_another() -> None:
    short, full = make_line([1]), make_line([4, 4])
    formed = form([short, full], 0, rules(8, delay_us=100))
    assert isinstance(formed, Batch)
    assert formed.requests == full
    waits = form([make_line([1], [5000]), make_line([1], [7000])], 7000, rules(8, delay_us=100))
    assert isinstance(waits, Wait)
    assert waits.until_ns == 105_000


def measured(ns: Callable[[int], int], sizes: Sequence[int] = (1, 2, 4, 8)) -> LatencyModel:
    """A latency model with many recent measurements of each size."""
    latency = LatencyModel()
    for rows in sizes:
        for _ in range(64):
            latency.observe(rows, ns(rows), 0)
    return latency


def test_under_a_backlog_the_nearly_late_are_dropped_so_that_batches_stay_full() -> None:
    latency = measured(lambda rows: 4 * MS + rows * MS)
    line = make_line([1] * 8, deadline_ns=6 * MS) + [
        make_pending(number, deadline_ns=50 * MS) for number in range(8, 20)
    ]
    formed = form([line], 0, rules(8), latency)
    assert isinstance(formed, Batch)
    assert formed.requests == line[8:16]
    assert list(formed.late) == line[:8]


def test_a_smaller_batch_runs_where_a_full_one_would_be_late_for_all() -> None:
    latency = measured(lambda rows: rows * MS)
    formed = form([make_line([1] * 16, deadline_ns=5 * MS)], 0, rules(8), latency)
    assert isinstance(formed, Batch)
    assert len(formed.requests) == 4
    assert not formed.late


def test_without_a_backlog_nobody_is_dropped_who_can_be_served_first() -> None:
    latency = measured(lambda rows: 2 * MS + rows * MS // 2)
    line = [make_pending(0, deadline_ns=4 * MS), *(make_pending(number, deadline_ns=60 * MS) for number in range(1, 8))]
    formed = form([line], 0, rules(8), latency)
    assert isinstance(formed, Batch)
    assert line[0] in formed.requests
    assert not formed.late


def test_all_late_leaves_nothing_to_run() -> None:
    latency = measured(lambda rows: 10 * MS)
    line = make_line([1] * 3, deadline_ns=5 * MS)
    formed = form([line], 0, rules(8), latency)
    assert isinstance(formed, Wait)
    assert list(formed.late) == line


def test_nobody_is_late_by_an_estimate_that_nobody_made() -> None:
    formed = form([make_line([1] * 3, deadline_ns=5)], 0, rules(8), LatencyModel())
    assert isinstance(formed, Batch)
    assert not formed.late


def test_a_delay_ends_before_it_would_cost_a_deadline() -> None:
    latency = measured(lambda rows: 3 * MS)
    line = make_line([1], deadline_ns=10 * MS)
    waits = form([line], 0, rules(8, delay_us=50_000), latency)
    assert isinstance(waits, Wait)
    assert 0 < waits.until_ns < 7 * MS
    formed = form([line], waits.until_ns, rules(8, delay_us=50_000), latency)
    assert isinstance(formed, Batch)
    assert formed.reason is Reason.DELAY


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(1, 10), st.sampled_from([2, 5, 9, 30, 1000])), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(0, 5),
)
def test_with_deadlines_everyone_is_in_the_batch_late_or_left(
    arrivals: list[tuple[int, int]], max_batch: int, fixed_ms: int
) -> None:
    latency = measured(lambda rows: (fixed_ms + rows) * MS)
    line = [make_pending(number, rows, 0, ms * MS) for number, (rows, ms) in enumerate(arrivals)]
    formed = form([line], 0, rules(max_batch), latency)
    late = {pending.number for pending in formed.late}
    assert all(pending.deadline_ns < NEVER for pending in formed.late)
    if isinstance(formed, Batch):
        assert formed.rows <= max_batch or len(formed.requests) == 1
        kept = [pending for pending in line if pending.number not in late]
        assert formed.requests == kept[: len(formed.requests)]
        if len(formed.requests) > 1:
            end_ns = latency.upper(formed.rows, 0)
            assert all(pending.deadline_ns >= 0.9 * end_ns for pending in formed.requests)
    else:
        assert len(late) == len(line)


def test_a_delayed_batch_leaves_two_milliseconds_before_its_last_moment() -> None:
    latency = measured(lambda rows: 3 * MS)
    line = make_line([1, 1], deadline_ns=10 * MS)
    line[0].deadline_ns = 11 * MS
    waits = form([line], 0, rules(8, delay_us=50_000), latency)
    assert isinstance(waits, Wait)
    assert waits.until_ns == pytest.approx(5 * MS, abs=10)
    assert isinstance(form([line], waits.until_ns - 1, rules(8, delay_us=50_000), latency), Wait)
    assert isinstance(form([line], waits.until_ns, rules(8, delay_us=50_000), latency), Batch)


def test_a_deadline_of_unknown_cost_does_not_wait() -> None:
    formed = form([make_line([1], deadline_ns=10 * MS)], 0, rules(8, delay_us=50_000), LatencyModel())
    assert isinstance(formed, Batch)
    assert formed.reason is Reason.DELAY
    assert isinstance(form([make_line([1])], 0, rules(8, delay_us=50_000), LatencyModel()), Wait)


def test_a_batch_of_exactly_the_largest_size_is_full_and_a_larger_request_alone() -> None:
    for rows, reason, count in (([8], Reason.FULL, 1), ([9, 1], Reason.ALONE, 1), ([4, 3, 2], Reason.FULL, 2)):
        for delay_us in (0, 100):
            formed = form([make_line(rows)], 0, rules(8, delay_us=delay_us))
            assert isinstance(formed, Batch)
            assert (formed.reason, len(formed.requests), formed.rows) == (reason, count, sum(rows[:count]))
            assert formed.taken_ns == 0


def test_rules_follow_the_configuration() -> None:
    assert rules(8) == Rules(8, frozenset([8]), 8, 0, True, True)
    assert rules(8, (8,)).natural
    assert rules(8, (2, 4)) == Rules(8, frozenset([2, 4]), 4, 0, False, True)
    assert rules(8, delay_us=3) == Rules(8, frozenset([8]), 8, 3000, False, True)
    for kind in ({"batchable": False}, {"batchable": True, "decoupled": True}):
        config = BatchingConfig(
            max_batch=8,
            preferred_batch_size=(4,),
            max_queue_delay_microseconds=9,
            **kind,  # type: ignore[arg-type]
        )
        assert Rules.of(config) == Rules(1, frozenset([1]), 1, 0, True, False)


def test_requests_that_are_too_late_are_dropped_from_every_line() -> None:
    latency = measured(lambda rows: 10 * MS)
    gone, kept = make_line([1, 1], deadline_ns=5 * MS), make_line([1, 1], deadline_ns=50 * MS)
    for number, pending in enumerate(kept, start=10):
        pending.number = number
    formed = form([gone, kept], 0, rules(8), latency)
    assert isinstance(formed, Batch)
    assert (formed.requests, list(formed.late)) == (kept, gone)
    waits = form([gone, kept], 0, rules(8, delay_us=90_000), latency)
    assert isinstance(waits, Wait)
    assert list(waits.late) == gone
    assert waits.until_ns == pytest.approx(38 * MS, abs=100)


def test_a_deadline_at_the_end_of_the_batch_is_met() -> None:
    latency = measured(lambda rows: 10 * MS)
    end_ns = latency.upper(1, 0)
    assert not form([[make_pending(0, deadline_ns=end_ns)]], 0, rules(8), latency).late
    assert form([[make_pending(0, deadline_ns=end_ns - 1)]], 0, rules(8), latency).late


def test_a_request_above_the_batch_size_has_the_duration_of_its_own_rows() -> None:
    latency = measured(lambda rows: rows * MS, (1, 2, 4, 8, 16))
    line = [make_pending(0, 16, deadline_ns=12 * MS), make_pending(1, deadline_ns=12 * MS)]
    formed = form([line], 0, rules(8), latency)
    assert (list(formed.late), formed.requests) == (line[:1], line[1:])  # type: ignore[union-attr]
    line[0].deadline_ns = 17 * MS
    formed = form([line], 0, rules(8), latency)
    assert (list(formed.late), formed.requests) == ([], line[:1])  # type: ignore[union-attr]


def test_without_a_backlog_a_second_batch_that_is_in_time_counts() -> None:
    """All in one batch would drop the first; in two batches, everyone is served."""
    latency = measured(lambda rows: rows * MS)
    line = [make_pending(n, deadline_ns=ms * MS + 1000) for n, ms in enumerate([4, 4, 4, 4, 8, 8, 8, 8])]
    formed = form([line], 0, rules(8), latency)
    assert isinstance(formed, Batch)
    assert (formed.requests, list(formed.late)) == (line[:4], [])


def test_without_a_backlog_a_second_batch_that_is_late_does_not_count() -> None:
    """Half of them in time now is no better than the other half in one batch of all."""
    latency = measured(lambda rows: 6 * MS if rows > 4 else 5 * MS)
    line = [make_pending(n, deadline_ns=(5.5 if n < 3 else 7) * MS) for n in range(8)]  # type: ignore[arg-type]
    formed = form([line], 0, rules(8), latency)
    assert isinstance(formed, Batch)
    assert (formed.requests, list(formed.late)) == (line[3:], line[:3])


def test_requests_without_rows_always_fit() -> None:
    for rows, reason in (([0] * 9, Reason.IDLE), ([8] + [0] * 9, Reason.FULL)):
        formed = form([make_line(rows)], 0, rules(8))
        assert isinstance(formed, Batch)
        assert (len(formed.requests), formed.reason) == (len(rows), reason)


def test_a_full_batch_that_has_waited_is_full() -> None:
    formed = form([make_line([6, 3])], 100_000, rules(8, delay_us=100))
    assert isinstance(formed, Batch)
    assert (formed.rows, formed.reason) == (6, Reason.FULL)


def test_under_a_backlog_the_batch_size_of_most_requests_per_second_wins() -> None:
    latency = measured(lambda rows: 100 * MS if rows > 4 else 10 * MS)
    line = [make_pending(n, deadline_ns=(12 if n < 4 else 200) * MS) for n in range(20)]
    formed = form([line], 0, rules(8), latency)
    assert isinstance(formed, Batch)
    assert (formed.requests, list(formed.late)) == (line[:4], [])


def test_a_second_batch_has_the_duration_of_its_rows() -> None:
    latency = measured(lambda rows: rows * MS)
    line = [make_pending(0, deadline_ns=12 * MS // 10), make_pending(1, deadline_ns=23 * MS // 10)]
    formed = form([line], 0, rules(8), latency)
    assert isinstance(formed, Batch)
    assert (formed.requests, list(formed.late)) == (line[:1], [])


def test_under_a_backlog_only_the_next_batch_is_looked_at() -> None:
    latency = measured(lambda rows: 10 * MS)
    line = [make_pending(n, deadline_ns=(2 if n == 9 else 50) * MS) for n in range(17)]
    formed = form([line], 0, rules(8), latency)
    assert isinstance(formed, Batch)
    assert (formed.requests, list(formed.late)) == (line[:8], [])
