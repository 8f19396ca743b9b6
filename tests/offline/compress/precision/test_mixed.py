from __future__ import annotations

import functools

import msgspec

import culprits
from penstock.engines.registry import get_engine
from penstock.measurement import Interval
from penstock.offline.compress.precision.mixed import MixedOptions, choose, recovery
from penstock.offline.compress.precision.sensitivity import SensitivityOptions, SensitivityReport, measure_sensitivity
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.judge.accuracy import answers
from penstock.offline.judge.contract import Contract

STRICT = Contract(max_accuracy_loss=0.02)
LENIENT = Contract(max_accuracy_loss=0.5, max_output_error=1.0)


@functools.cache
def report() -> SensitivityReport:
    return measure_sensitivity(culprits.trials(), SensitivityOptions(budget_s=0))


def with_savings(saving_ms: dict[str, float], unpaying: tuple[str, ...] = ()) -> SensitivityReport:
    """The report as if these groups had been timed."""
    groups = tuple(
        msgspec.structs.replace(one, saving_ms=Interval(*[saving_ms[one.group.name]] * 3))
        if one.group.name in saving_ms
        else one
        for one in report().groups
    )
    return msgspec.structs.replace(report(), groups=groups, unpaying=unpaying)


def test_the_two_culprits_float_win_back_four_fifths_of_the_loss() -> None:
    found = recovery(culprits.trials(), report(), share=2 / 12)
    assert found.groups == 2
    assert found.accuracy is not None
    assert found.accuracy >= 0.8
    assert found.divergence is not None
    assert found.divergence >= 0.9


def test_the_contract_is_kept_by_the_culprits_alone() -> None:
    trials = culprits.trials()
    result = choose(trials, report(), STRICT)
    assert result.float_groups == ("wide4", "narrow4")
    assert STRICT.accuracy_objection(result.accuracy) == ""
    mixed = trials.mixed
    again = quantize(mixed.artifact, mixed.ranges, culprits.SCHEME, mixed.placement, result.float_nodes)
    assert result.artifact.data == again.data
    model = get_engine("onnxruntime").load(result.artifact, {"threads": 1})
    assert trials.judge.reference.compare(answers(model, trials.judge.data)) == result.accuracy
    assert result.trail[-1].loss == result.accuracy.loss.value
    step = result.artifact.provenance[-1]
    assert step.name == "mixed_precision"
    assert step.options["float_groups"] == ["wide4", "narrow4"]


def test_the_same_report_gives_the_same_result() -> None:
    known = culprits.trials()
    first, second = (choose(Trials(known.mixed, known.judge), report(), STRICT) for _ in range(2))
    assert first == second


def test_an_int8_model_that_keeps_the_contract_stays_as_it_is() -> None:
    trials = culprits.trials()
    result = choose(trials, report(), LENIENT)
    assert result.float_groups == ()
    assert result.trail == ()
    assert result.artifact.data == trials.mixed.with_float().data


def test_groups_whose_integers_save_no_time_are_float_from_the_start() -> None:
    result = choose(culprits.trials(), with_savings({}, ("wide0", "y")), LENIENT)
    assert result.float_groups == ("wide0", "y")
    assert result.trail[0].precision == "float"
    assert "no time" in result.trail[0].reason


def test_what_costs_much_time_for_little_accuracy_comes_late() -> None:
    names = [group.name for group in culprits.trials().mixed.groups]
    cheap = dict.fromkeys(names, 0.01)
    result = choose(culprits.trials(), with_savings(cheap | {"wide4": 100.0, "narrow4": 100.0}), STRICT)
    assert STRICT.accuracy_objection(result.accuracy) == ""
    # All the cheap ones together do not do it; they become integer again.
    assert {"wide4", "narrow4"} <= set(result.float_groups)
    assert any(step.precision == "integer" for step in result.trail) or len(result.float_groups) == 2


def test_a_contract_that_no_integer_version_keeps_gives_the_original() -> None:
    trials = culprits.trials()
    # 200 samples prove no loss of nothing.
    result = choose(trials, report(), Contract(0.0, prove_accuracy=True))
    assert result.artifact is trials.mixed.artifact
    assert len(result.float_groups) == len(report().groups)
    assert result.accuracy.loss.value == 0


def test_the_search_ends_with_its_versions() -> None:
    known = culprits.trials()
    trials = Trials(known.mixed, known.judge)
    result = choose(trials, report(), STRICT, MixedOptions(max_versions=1))
    assert STRICT.accuracy_objection(result.accuracy) == ""
    # The INT8 model, and what is told of the steps; not one for every group.
    assert result.versions <= 4


def test_one_by_one_where_bisection_asks_for_many() -> None:
    # A report that is wrong about the order: culprits last.
    wrong = msgspec.structs.replace(report(), groups=report().groups[::-1])
    result = choose(culprits.trials(), wrong, STRICT)
    assert STRICT.accuracy_objection(result.accuracy) == ""
    assert set(result.float_groups) == {"wide4", "narrow4"}
    assert "among the remaining groups" in result.trail[0].reason
