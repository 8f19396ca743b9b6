"""Coverage: which calls run a line for the first time."""

from __future__ import annotations

import sys

from tests.fuzz.coverage import Coverage


def _choose(number: int) -> int:
    if number > 5:
        return 1
    return 2


def test_a_call_that_runs_a_new_line_is_told() -> None:
    coverage = Coverage(__file__)
    before = sys.gettrace()
    assert coverage.run(lambda: None if _choose(1) else None)
    assert not coverage.run(lambda: None if _choose(2) else None)
    assert coverage.run(lambda: None if _choose(7) else None)
    assert coverage.reached == 3
    assert sys.gettrace() is before


def test_other_files_do_not_count() -> None:
    coverage = Coverage("/nowhere")
    assert not coverage.run(lambda: None if _choose(1) else None)
    assert coverage.reached == 0
