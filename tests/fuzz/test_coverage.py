"""Coverage: which calls run a line for the first time."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.fuzz.coverage import Coverage


def _choose(number: int) -> int:
    if number > 5:
        return 1
    return 2


def _call(number: int) -> Callable[[], None]:
    def call() -> None:
        _choose(number)

    return call


def test_a_call_that_runs_a_new_line_is_told() -> None:
    coverage = Coverage(__file__)
    before = sys.gettrace()
    assert coverage.run(_call(1))
    assert not coverage.run(_call(2))
    assert coverage.run(_call(7))
    assert coverage.reached == 4
    assert sys.gettrace() is before


def test_other_files_do_not_count() -> None:
    coverage = Coverage("/nowhere")
    assert not coverage.run(_call(1))
    assert coverage.reached == 0
