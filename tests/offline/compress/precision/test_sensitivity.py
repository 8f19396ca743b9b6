from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import msgspec
import pytest

import culprits
from penstock.errors import InvalidConfig
from penstock.measurement import Interval
from penstock.offline.compress.precision import sensitivity
from penstock.offline.compress.precision.savings import Savings
from penstock.offline.compress.precision.sensitivity import (
    SensitivityOptions,
    SensitivityReport,
    measure_sensitivity,
    score,
    sensitivity_chart,
)
from penstock.offline.compress.precision.trials import Trials

UNTIMED = SensitivityOptions(budget_s=0)


@pytest.fixture(scope="module")
def report() -> SensitivityReport:
    return measure_sensitivity(culprits.trials(), UNTIMED)


def test_the_groups_that_are_known_to_spoil_it_come_first(report: SensitivityReport) -> None:
    names = [one.group.name for one in report.groups]
    assert sorted(names[:2]) == ["narrow4", "wide4"]
    assert sorted(names) == sorted(group.name for group in culprits.trials().mixed.groups)
    for one in report.groups[:2]:
        assert one.rank.alone is not None
        assert one.rank.alone.low > 0
    # Each hides behind the other: alone float, neither wins back half of the loss.
    assert report.int8.loss.value > 0.1
    assert all(one.rank.recovered.value < 0.5 * report.int8.loss.value for one in report.groups)


def test_a_report_holds_what_was_measured(report: SensitivityReport) -> None:
    trials = culprits.trials()
    assert report.metric == "agreement"
    assert report.int8 == trials.outcome().accuracy
    assert report.original.value == 1
    assert report.samples == 200
    assert report.untimed == tuple(one.group.name for one in report.groups)
    assert report.int8_ms is None
    for one in report.groups:
        assert one.rank.recovered == trials.gain([], [one.group.name])
        assert one.weight is not None
        assert 30 < one.weight.sqnr_db < 60
        assert one.activation is not None
        assert one.activation.tensor in trials.mixed.statistics


def test_it_is_deterministic_and_survives_json(report: SensitivityReport) -> None:
    known = culprits.trials()
    again = measure_sensitivity(Trials(known.mixed, known.judge), UNTIMED)
    assert again == report
    assert msgspec.json.decode(msgspec.json.encode(report), type=SensitivityReport) == report


def test_progress_ends_with_all_versions() -> None:
    seen: list[tuple[int, int]] = []
    measure_sensitivity(
        culprits.trials(), SensitivityOptions(alone=False, refined=0, budget_s=0), lambda *at: seen.append(at)
    )
    assert [done for done, _ in seen] == list(range(1, 13))
    assert {total for _, total in seen} == {12}


def test_savings_are_measured_where_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int, float, int]] = []

    def savings(_trials: Trials, *rest: Any) -> Savings:
        asked.append(rest)
        return Savings(0.5, {"wide4": Interval(0.1, 0.0, 0.2)}, ("wide0",))

    monkeypatch.setattr(sensitivity, "measure_savings", savings)
    report = measure_sensitivity(culprits.trials(), SensitivityOptions(budget_s=3.0, rows=2, memory_bytes=99))
    names = [one.group.name for one in report.groups]
    assert asked == [(names, 2, 3.0, 99)]
    assert report.untimed == tuple(name for name in names if name != "wide4")
    assert (report.int8_ms, report.rows, report.unpaying) == (0.5, 2, ("wide0",))


def test_the_score_counts_a_saving_for_at_least_what_its_measurement_leaves_open(report: SensitivityReport) -> None:
    rank = msgspec.structs.replace(report.groups[0].rank, expected=0.1)
    assert score(rank, None) == 0.1
    assert score(rank, Interval(0.5, 0.4, 0.6)) == pytest.approx(0.2)
    assert score(rank, Interval(0.01, -0.19, 0.21)) == pytest.approx(0.5)
    assert score(rank, Interval(-1.0, -1.0, -1.0)) == pytest.approx(100)


def test_the_chart_has_three_bars_for_every_group(report: SensitivityReport) -> None:
    root = ET.fromstring(sensitivity_chart(report))
    tips = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) == 3 * len(report.groups)
    assert tips[0].startswith(report.groups[0].group.name)


@pytest.mark.parametrize(
    "options", [{"rows": 0}, {"budget_s": -1}, {"budget_s": float("nan")}, {"budget_s": float("inf")}, {"refined": 2}]
)
def test_options_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(InvalidConfig):
        SensitivityOptions(**options)
