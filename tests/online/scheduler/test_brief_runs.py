from hypothesis import given
from hypothesis import strategies as st

from penstock.online.scheduler.brief_runs import BRIEF_NS, LONG_NS, MOST, NEEDED, BriefRuns


def after(*runs: tuple[int, int], key: object = None) -> BriefRuns:
    """The state after runs of ``(rows, ns)``."""
    brief = BriefRuns()
    for rows, ns in runs:
        brief.observe(key, rows, ns)
    return brief


def test_nothing_is_allowed_before_it_was_brief_often_enough() -> None:
    assert not after().allow(None, 1)
    assert not after(*[(4, BRIEF_NS)] * (NEEDED - 1)).allow(None, 1)
    brief = after(*[(4, BRIEF_NS)] * NEEDED)
    assert brief.allow(None, 1)
    assert brief.allow(None, 4)


def test_more_rows_than_were_seen_are_not_allowed() -> None:
    brief = after(*[(4, 1)] * NEEDED)
    assert not brief.allow(None, 5)
    brief.observe(None, 8, 1)
    assert brief.allow(None, 8)


def test_other_shapes_are_not_allowed_and_begin_anew() -> None:
    brief = after(*[(4, 1)] * MOST, key=(3,))
    assert brief.allow((3,), 1)
    assert not brief.allow((4,), 1)
    brief.observe((4,), 4, 1)
    assert not brief.allow((4,), 1)
    assert not brief.allow((3,), 1)


def test_after_one_that_was_not_brief_its_size_is_tried_on_the_thread() -> None:
    brief = after(*[(4, 1)] * MOST, (4, BRIEF_NS + 1))
    assert brief.allow(None, 3)
    assert not brief.allow(None, 4)
    brief.observe(None, 4, 1)
    assert brief.allow(None, 4)


def test_a_long_run_or_a_failure_loses_all_that_was_earned() -> None:
    brief = after(*[(4, 1)] * MOST, (9, LONG_NS))
    assert not brief.allow(None, 1)
    brief = after(*[(4, 1)] * MOST)
    brief.failed()
    assert not brief.allow(None, 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, BRIEF_NS, BRIEF_NS + 1, LONG_NS])), max_size=300))
def test_at_most_every_sixteenth_run_that_was_allowed_is_not_brief(runs: list[tuple[int, int]]) -> None:
    brief, slow_here, quick = BriefRuns(), 0, 0
    for rows, ns in runs:
        if ns > BRIEF_NS:
            slow_here += brief.allow(None, rows)
        else:
            quick += 1
        brief.observe(None, rows, ns)
        assert slow_here <= quick / NEEDED


def test_a_model_that_has_become_slow_is_noticed_at_once() -> None:
    brief = after(*[(4, 1)] * 1000)
    allowed = 0
    for _ in range(100):
        allowed += brief.allow(None, 4)
        brief.observe(None, 4, BRIEF_NS * 2)
    assert allowed == 1


def test_each_run_that_was_not_brief_costs_as_much_as_sixteen_brief_ones_earn() -> None:
    brief = after(*[(4, 1)] * (2 * NEEDED + 1), (8, BRIEF_NS + 1))
    assert brief.earned == NEEDED + 1
    assert brief.allow(None, 4)
    brief.observe(None, 8, LONG_NS - 1)
    assert brief.earned == 1
    brief.observe(None, 8, BRIEF_NS + 1)
    assert brief.earned == 0


def test_credit_has_a_limit() -> None:
    """However long a model was quick, four slow runs send its batches to the thread."""
    brief = after(*[(4, 1)] * 1000)
    for _ in range(3):
        brief.observe(None, 8, 100_001)
    assert brief.allow(None, 4)
    brief.observe(None, 8, 100_001)
    assert not brief.allow(None, 1)


def test_a_run_is_brief_up_to_a_tenth_of_a_millisecond_and_long_from_ten() -> None:
    assert after(*[(4, 100_000)] * 16).allow(None, 4)
    assert not after(*[(4, 100_000)] * 15).allow(None, 4)
    assert not after(*[(4, 100_001)] * 16).allow(None, 4)
    assert after(*[(4, 1)] * 64, (8, 9_999_999)).allow(None, 4)
    assert not after(*[(4, 1)] * 64, (8, 10_000_000)).allow(None, 4)


def test_credit_begins_at_nothing_after_a_long_run() -> None:
    assert not after(*[(4, 1)] * MOST, (8, LONG_NS), *[(4, 1)] * (NEEDED - 1)).allow(None, 4)


def test_credit_begins_at_nothing_after_a_failure_and_for_other_shapes() -> None:
    brief = after(*[(4, 1)] * MOST, key=(3,))
    brief.failed()
    for key in ((3,), (4,)):
        for _ in range(NEEDED - 1):
            brief.observe(key, 2, 1)
        assert not brief.allow(key, 1)


def test_other_shapes_keep_no_rows() -> None:
    brief = after(*[(4, 1)] * MOST, key=(3,))
    for _ in range(NEEDED):
        brief.observe((4,), 2, 1)
    assert brief.allow((4,), 2)
    assert not brief.allow((4,), 3)
