from __future__ import annotations

from penstock.offline.judge.metric_table import METRICS


def test_only_bounded_scores_where_higher_is_better_are_shown_in_per_cent() -> None:
    assert METRICS["top-1"].is_share
    assert not METRICS["mae"].is_share
    assert not METRICS["cosine"].is_share
