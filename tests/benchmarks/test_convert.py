"""The campaign of injected faults."""

from __future__ import annotations

import pytest

from benchmarks.results import Row
from benchmarks.scenarios.convert import faults


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


def test_found_and_named_faults_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = by_name(faults(quick=True, kinds=["softmax axis", "lost bias"]))
    assert rows["injected faults that are found"].value == 2
    assert rows["guilty nodes that are named"].value == 2
    assert "of 2 kinds" in rows["injected faults that are found"].note
    assert capsys.readouterr().err.splitlines() == ["softmax axis: found in encoder", "lost bias: found in resnet"]


def test_a_fault_that_no_graph_has_is_not_counted() -> None:
    rows = by_name(faults(quick=True, kinds=["lost bias"], graphs=["masked"]))
    assert rows["kinds of injected faults"].value == 0
    assert rows["injected faults that are found"].value == 0
