"""Rows judge themselves, result files read back as written, and RESULTS.md says what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import results
from benchmarks.__main__ import REPORT
from benchmarks.results import Operator, Result, Row, claim, fact, failed, skipped
from benchmarks.scenarios import REPORTED
from penstock.measurement import Conditions, Interval
from penstock.resources import machine_facts

MACHINE: dict[str, Any] = {
    **msgspec.to_builtins(machine_facts()),
    "date": "2025-01-31",
    **msgspec.to_builtins(Conditions(0.5, 1.0, 0.0, dirty=False)),
    "versions": {"penstock": "0.1.0"},
}


def result(*rows: Row, scenario: str = "digits", quick: bool = False, **machine: Any) -> Result:
    return Result(scenario=scenario, about="One against the other.", machine=MACHINE | machine, quick=quick, rows=rows)


def test_the_report_shows_the_stored_results() -> None:
    assert REPORT.read_text() == results.render(results.load(REPORTED))


@pytest.mark.parametrize(
    ("value", "op", "goal", "holds"),
    [(4.0, ">=", 4, True), (3.99, ">=", 4, False), (0.01, "<=", 0.01, True), (0.02, "<=", 0.01, False)],
)
def test_a_claim_is_judged_by_the_worse_end(value: float, op: Operator, goal: float, holds: bool) -> None:
    assert claim("x", value, "×", op, goal).holds is holds
    best = 100.0 if op == ">=" else 0.0
    worse_end = Interval(value, *sorted((value, best)))
    assert claim("x", worse_end, "×", op, goal).holds is holds
    assert claim("x", Interval(best, *sorted((value, best))), "×", op, goal).holds is holds


def test_only_claims_can_fail() -> None:
    low, high, info = claim("a", 1, "×", ">=", 4), claim("b", 5, "×", ">=", 4), fact("c", 1, "ms")
    assert failed([low, high, info]) == [low]
    assert (info.op, info.goal, info.holds) == (None, None, None)


def test_what_was_not_measured_says_why_and_cannot_fail(tmp_path: Path) -> None:
    row = skipped("peer", RuntimeError("not\n installed"))
    assert failed([row]) == []
    results.save(result(row), tmp_path)
    assert results.load(("digits",), tmp_path)[0].rows == (row,)
    assert "| peer | not measured |  |  | not installed |" in results.render([result(row)])


def test_the_file_has_the_keys_that_scripts_read(tmp_path: Path) -> None:
    path = results.save(result(claim("ratio", Interval(5.0, 4.5, 5.5), "×", ">=", 4), fact("p50", 0.2, "ms")), tmp_path)
    read = json.loads(path.read_text())
    assert path.name == "digits.json"
    assert read["quick"] is False
    assert read["machine"]["cpu"] == MACHINE["cpu"]
    keys = ("name", "value", "unit", "op", "goal", "holds")
    assert [[row[key] for key in keys] for row in read["rows"]] == [
        ["ratio", 5.0, "×", ">=", 4, True],
        ["p50", 0.2, "ms", None, None, None],
    ]


def test_results_read_back_in_the_order_asked_for(tmp_path: Path) -> None:
    first, second = result(fact("x", 1, "s"), scenario="one"), result(fact("y", 2, "s"), scenario="two")
    for one in (first, second):
        results.save(one, tmp_path)
    assert [one.scenario for one in results.load(("two", "absent", "one"), tmp_path)] == ["two", "one"]
    assert results.load(("one",), tmp_path)[0].rows == first.rows


def test_a_later_run_replaces_an_earlier_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        results.save(result(fact("x", value, "s")), tmp_path)
    assert [row.value for row in results.load(("digits",), tmp_path)[0].rows] == [2.0]


def test_a_part_replaces_its_rows_among_the_others() -> None:
    earlier = result(fact("a", 1, "s"), fact("b", 1, "s"), dirty=True)
    merged = results.merge([earlier], result(fact("b", 2, "s"), fact("c", 2, "s")))
    assert [(row.name, row.value) for row in merged.rows] == [("a", 1), ("b", 2), ("c", 2)]
    assert merged.machine["dirty"]
    assert results.merge([], merged) == merged
    later = result(fact("b", 3, "s"), date="2025-02-01")
    once = results.merge([merged], later)
    assert [row.note for row in once.rows] == ["measured on 2025-01-31", "measured on 2025-01-31", ""]
    assert results.merge([once], result(fact("d", 3, "s"), date="2025-02-02")).rows[0] == once.rows[0]


def test_the_report_has_a_table_per_scenario() -> None:
    text = results.render(
        [
            result(claim("ratio", Interval(5.04, 4.5, 5.5), "×", ">=", 4, note="a | b")),
            result(claim("loss", 0.5, "", "<=", 0.01), fact("memory", 12345.6, "B"), scenario="int8"),
        ]
    )
    assert "## digits" in text
    assert "| ratio | 5.04× [4.5, 5.5] | ≥ 4× | yes | a / b |" in text
    assert "| loss | 0.5 | ≤ 0.01 | **no** |  |" in text
    assert "| memory | 12,346 B |  |  |  |" in text
    assert MACHINE["cpu"] in text
    assert "penstock 0.1.0" in text


@pytest.mark.parametrize(
    ("quick", "dirty", "words"), [(True, False, "Rough"), (False, True, "busy"), (False, False, "")]
)
def test_the_report_says_what_to_doubt(quick: bool, dirty: bool, words: str) -> None:
    section = results.render([result(fact("x", 1, "s"), quick=quick, dirty=dirty)])
    assert ("Rough" in section, "busy" in section) == (quick, dirty)
    assert words in section
