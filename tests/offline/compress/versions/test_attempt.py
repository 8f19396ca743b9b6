"""Attempts: results, and reasons of failures."""

import pytest

from penstock.errors import Unsupported
from penstock.offline.compress.versions.attempt import attempt


def test_a_result_is_returned_and_a_failure_has_a_reason() -> None:
    failures: dict[str, str] = {}

    def fail() -> int:
        raise Unsupported("no such layer", "")

    assert attempt("good", lambda: 1, failures) == 1
    assert attempt("bad", fail, failures) is None
    assert failures == {"bad": "no such layer"}


def test_a_defect_is_a_failure_and_an_interruption_is_not() -> None:
    failures: dict[str, str] = {}

    def interrupt() -> None:
        raise KeyboardInterrupt

    assert attempt("defect", lambda: 1 // 0, failures) is None
    assert failures["defect"].startswith("internal error: ZeroDivisionError")
    with pytest.raises(KeyboardInterrupt):
        attempt("stop", interrupt, failures)
