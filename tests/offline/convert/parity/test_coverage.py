"""Rows of tables that no call reads."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.offline.convert.parity.coverage import Coverage, shown
from penstock.offline.convert.parity.nodes import Nodes
from tests.compared import parsed

GATHER = parsed(
    "g (int64[N] x) => (float[N,2] y) <float[4,2] table = {0,1,2,3,4,5,6,7}> { y = Gather <axis = 0> (table, x) }"
)
SLICE = parsed(
    "g (int64[1] x) => (float[N] y)"
    " <float[6] table = {0,1,2,3,4,5}, int64[1] start = {0}, int64[1] axis = {0}> { y = Slice(table, start, x, axis) }"
)


def test_a_gather_reads_its_indices() -> None:
    coverage = Coverage(Nodes(GATHER))
    assert coverage.lengths() == [4]
    coverage.note({"x": np.array([0, 2])})
    assert [(name, rows.tolist()) for name, rows in coverage.unread()] == [("table", [1, 3])]
    coverage.note({"x": np.array([-1])})
    assert [rows.tolist() for _, rows in coverage.unread()] == [[1]]
    assert coverage.lengths() == []
    coverage.note({"x": np.array([1])})
    assert not list(coverage.unread())


def test_a_slice_reads_its_range() -> None:
    coverage = Coverage(Nodes(SLICE))
    coverage.note({"x": np.array([4])})
    assert [rows.tolist() for _, rows in coverage.unread()] == [[4, 5]]
    coverage.note({"x": np.array([2])})
    assert [rows.tolist() for _, rows in coverage.unread()] == [[4, 5]]


def test_a_call_that_cannot_run_reads_nothing() -> None:
    coverage = Coverage(Nodes(GATHER))
    coverage.note({})
    assert [rows.tolist() for _, rows in coverage.unread()] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("rows", "text"),
    [([4, 5, 6, 7, 9], "4 to 7, 9"), ([3], "3"), ([1, 3, 5, 7, 9], "1, 3, 5, and 2 other ranges")],
)
def test_rows_are_shown_as_ranges(rows: list[int], text: str) -> None:
    assert shown(np.array(rows)) == text
