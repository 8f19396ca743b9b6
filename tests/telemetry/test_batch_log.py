import time

from hypothesis import given
from hypothesis import strategies as st

from penstock.telemetry.batch_log import BatchLog
from penstock.telemetry.quantiles import RecentDurations
from penstock.telemetry.statistics import BatchTimes, ModelStatistics, Reason

MS = 1_000_000

batches = st.lists(
    st.tuples(
        st.lists(st.integers(0, 20 * MS), min_size=1, max_size=6),  # arrivals
        st.lists(st.integers(0, 9 * MS), min_size=5, max_size=5),  # from stage to stage
        st.integers(1, 20),
        st.sampled_from(Reason),
        st.booleans(),  # whether somebody looks after it
    ),
    max_size=8,
)


@given(batches, st.integers(1, 40))
def test_what_was_noted_adds_up_to_what_adding_at_once_gives(
    given: list[tuple[list[int], list[int], int, Reason, bool]], repeat: int
) -> None:
    at_once, later = ModelStatistics(recent=RecentDurations()), ModelStatistics(recent=RecentDurations())
    log = BatchLog(later)
    for arrived, steps, rows, reason, looks in given * repeat:
        moments = [max(arrived)]
        for step in steps:
            moments.append(moments[-1] + step)
        for target in (at_once, log):
            target.executed(arrived, rows, reason, BatchTimes(*moments[1:5]), moments[5])
        if looks:
            log.digest()
    log.digest()
    at_once.last_inference_ns = later.last_inference_ns
    assert later == at_once


def test_it_keeps_no_more_than_so_much() -> None:
    statistics = ModelStatistics()
    log = BatchLog(statistics)
    for _ in range(1000):
        log.executed([0], 1, Reason.IDLE, BatchTimes(1, 2, 3, 4), 5)
    assert statistics.execution_count >= 1000 - 256
    before = statistics.success.count
    for _ in range(100):
        log.executed([0] * 1000, 1000, Reason.FULL, BatchTimes(1, 2, 3, 4), 5)
    assert statistics.success.count - before >= 96_000


def test_the_last_inference_is_when_it_was_answered_and_not_when_somebody_looks() -> None:
    statistics = ModelStatistics()
    log = BatchLog(statistics)
    ago_ns = 3600 * 10**9
    done_ns = time.monotonic_ns() - ago_ns
    log.executed([done_ns - 5], 1, Reason.IDLE, BatchTimes(done_ns, done_ns, done_ns, done_ns), done_ns)
    log.digest()
    assert abs(time.time_ns() - ago_ns - statistics.last_inference_ns) < ago_ns / 100
