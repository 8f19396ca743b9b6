"""The campaign of injected faults."""

from __future__ import annotations

import pytest

from benchmarks.results import Row
from benchmarks.scenarios.convert import Outcome, cpu_seconds, faults, zoo_rows


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


def test_models_that_cannot_be_converted_count_apart() -> None:
    outcomes = [Outcome(f"model {number}", "certified", "", 1.0, wants_diagnosis=False) for number in range(3)]
    outcomes += [
        Outcome("wrong", "failed", "differs", 1.0, wants_diagnosis=False),
        Outcome("refused", "diagnosed", "Svd", 1.0, wants_diagnosis=True),
        Outcome("crashed", "traceback", "KeyError: 1", 1.0, wants_diagnosis=True),
    ]
    rows = by_name(zoo_rows(outcomes))
    certified = rows["convertible models with a certificate"]
    assert (certified.value, certified.holds) == (75.0, False)
    assert certified.note == "3 of 4; wrong: failed: differs"
    diagnosed = rows["other models with the right diagnosis"]
    assert (diagnosed.value, diagnosed.goal, diagnosed.holds) == (1, 2, False)
    assert (rows["tracebacks"].value, rows["tracebacks"].holds) == (1, False)


def test_the_time_of_all_processes_counts() -> None:
    with pytest.raises(RuntimeError, match="(?s)no/model is not converted: .*KeyError"):
        cpu_seconds("no/model", "", "bare")
    assert cpu_seconds("caffe/lenet", "", "proved") > 0.5


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


def test_a_fault_that_changes_no_output_is_counted_apart() -> None:
    rows = by_name(faults(quick=True, kinds=["ceil_mode"], graphs=["quantised_net"]))
    assert rows["kinds of injected faults"].value == 0
    assert "; 1 injections left out" in rows["injected faults that are found"].note
