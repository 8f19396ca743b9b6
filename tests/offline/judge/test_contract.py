from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import evidences
from evidences import accuracy
from penstock.bundle.evidence import CandidateRecord
from penstock.cli.flags.quantities import parse_milliseconds, parse_share
from penstock.errors import ContractUnmet, InvalidConfig
from penstock.measurement import Interval
from penstock.offline.judge.contract import Contract, is_faster, unmet, unproven_speed


def record(name: str, *measured: float | None, **changes: object) -> CandidateRecord:
    """A candidate on an engine of its name, with which its title begins."""
    return evidences.record(name, *measured, engine=name, **changes)


@pytest.mark.parametrize("loss", [-0.01, 1.01, float("nan")])
def test_an_impossible_loss_is_refused(loss: float) -> None:
    with pytest.raises(InvalidConfig, match="between 0 % and 100 %"):
        Contract(max_accuracy_loss=loss)


@pytest.mark.parametrize("p99", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_latency_is_refused(p99: float) -> None:
    with pytest.raises(InvalidConfig, match="positive time"):
        Contract(p99_ms=p99)


def test_a_loss_up_to_what_is_allowed_is_fine() -> None:
    contract = Contract(max_accuracy_loss=0.01)
    assert contract.accuracy_objection(accuracy(0.98, loss=0.01)) == ""
    assert contract.accuracy_objection(accuracy(1.0, loss=-0.01)) == ""


def test_an_objection_to_accuracy_gives_the_figures() -> None:
    objection = Contract(max_accuracy_loss=0.01).accuracy_objection(accuracy(0.97, loss=0.02, spread=0.005))
    assert objection == "loses 2.00% top-1, 1.00% are allowed (95 % interval +1.50% … +2.50%, 500 samples)"


def test_proof_demands_the_upper_bound() -> None:
    doubtful = accuracy(0.985, loss=0.005, spread=0.01)
    assert Contract(0.01).accuracy_objection(doubtful) == ""
    assert Contract(0.01, prove_accuracy=True).accuracy_objection(doubtful).startswith("may lose up to 1.50% top-1")
    assert Contract(0.02, prove_accuracy=True).accuracy_objection(doubtful) == ""


def test_latency_is_judged_only_on_demand() -> None:
    assert Contract().latency_objection(1e9) == ""
    assert Contract(p99_ms=5).latency_objection(5.0) == ""
    assert Contract(p99_ms=5).latency_objection(5.25) == "p99 5.25 ms, 5 ms are allowed (--p99)"


def test_faster_means_provably() -> None:
    assert is_faster(Interval(1.1, 1.02, 1.2))
    assert not is_faster(Interval(2.0, 0.99, 4.0))
    assert not is_faster(Interval(1.01, 1.005, 1.02))


def test_latency_binds() -> None:
    # The p99 of a record is one and a half times its p50.
    error = unmet(Contract(0.01, p99_ms=0.5), [record("original", 1.0), record("int8", 0.4, 0.985)])
    assert isinstance(error, ContractUnmet)
    assert "latency: the lowest p99 is 0.6 ms, but at most 0.5 ms is allowed" in error.message
    assert error.hint == "--p99 0.66ms would suffice (int8 · FP32 · 1 thread)"


def test_accuracy_binds() -> None:
    error = unmet(Contract(0.01), [record("a", 0.5, 0.97), record("b", 0.4, 0.95)])
    assert "accuracy: the most accurate candidate loses 2.00% top-1, 1.00% are allowed" in error.message
    assert error.hint == "--max-accuracy-loss 2.2% would suffice (a · FP32 · 1 thread)"


def test_accuracy_and_latency_bind_together() -> None:
    error = unmet(Contract(0.01, p99_ms=1.0), [record("original", 1.0), record("int8", 0.4, 0.95)])
    assert "accuracy and latency: " in error.message
    assert error.hint == (
        "--p99 1.7ms would suffice (Original · original · 1 thread); "
        "--max-accuracy-loss 4.4% would suffice (int8 · FP32 · 1 thread)"
    )


def test_nothing_is_good_at_anything() -> None:
    error = unmet(Contract(0.01, p99_ms=0.1), [record("a", 1.0, 0.5)])
    assert "every candidate is both too inaccurate and too slow" in error.message
    assert error.hint == "--p99 1.7ms --max-accuracy-loss 54% would suffice (a · FP32 · 1 thread)"


def test_what_meets_it_by_chance_is_named() -> None:
    error = unmet(Contract(0.01, p99_ms=1.2), [record("original", 1.0), record("int8", 0.79, 0.985)])
    assert "only int8 · FP32 · 1 thread is within the limit" in error.message
    assert error.hint == "--p99 1.7ms would suffice (Original · original · 1 thread)"


def test_failed_candidates_do_not_count() -> None:
    assert "could be measured" in unmet(Contract(), [record("broken", None)]).message
    error = unmet(Contract(0.01, p99_ms=0.1), [record("original"), record("broken", None)])
    assert "broken" not in str(error)


RECORDS = st.lists(
    st.tuples(st.floats(0.01, 100), st.floats(0, 0.99)).map(lambda pair: record("c", *pair)), min_size=1, max_size=6
)


@given(RECORDS, st.floats(0, 0.5), st.floats(0.01, 100))
def test_following_either_hint_meets_the_contract(records: list[CandidateRecord], loss: float, p99: float) -> None:
    contract = Contract(loss, p99)

    def meets(demands: Contract) -> bool:
        return any(
            not demands.accuracy_objection(one.accuracy) and not demands.latency_objection(one.p99_ms)
            for one in records
            if one.accuracy and one.p99_ms
        )

    assume(not meets(contract))
    hint = unmet(contract, records).hint
    assert hint
    for time, share in re.findall(r"(?:--p99 (\S+) )?--max-accuracy-loss (\S+) would", hint):
        assert meets(Contract(parse_share(share), parse_milliseconds(time) if time else p99))
    for time in re.findall(r"--p99 (\S+) would", hint):
        assert meets(Contract(loss, parse_milliseconds(time)))


def test_the_hint_for_an_output_that_differs_names_its_option() -> None:
    far = record("int8", 0.4, accuracy=accuracy(0.99, 0.0, unjudged_output="boxes", unjudged_error=0.2))
    error = unmet(Contract(0.01), [far])
    assert "output 'boxes' differs by 20.0% from the original's, 10% are allowed" in error.message
    assert error.hint == "--max-output-error 22% would suffice (int8 · FP32 · 1 thread)"
    assert Contract(0.01, max_output_error=0.22).accuracy_objection(far.accuracy) == ""  # type: ignore[arg-type]


def test_nothing_suffices_for_broken_answers() -> None:
    error = unmet(Contract(0.01), [record("int8", 0.4, accuracy=accuracy(broken="output 'y' is NaN"))])
    assert "output 'y' is NaN" in error.message
    assert error.hint == ""


def test_fidelity_has_its_own_limit() -> None:
    contract = Contract(0.5, max_output_error=0.1)
    assert (contract.limit("fidelity"), contract.limit("top-1")) == (0.1, 0.5)
    assert contract.accuracy_objection(accuracy(0.8, 0.2, metric="fidelity")).startswith("loses 20.00% fidelity")


def test_proof_is_by_the_one_sided_bound_and_says_how_many_samples_it_takes() -> None:
    proven = accuracy(0.99, 0.0, spread=0.0125, bound=0.0099)
    assert Contract(0.01, prove_accuracy=True).accuracy_objection(proven) == ""
    doubtful = accuracy(0.99, 0.0, spread=0.0125, bound=0.0101, samples=290)
    assert "about 299 samples would prove it" in Contract(0.01, prove_accuracy=True).accuracy_objection(doubtful)


@pytest.mark.parametrize("error", [-0.1, float("nan")])
def test_an_impossible_output_error_is_refused(error: float) -> None:
    with pytest.raises(InvalidConfig, match="output error allowed"):
        Contract(max_output_error=error)


def test_the_ends_of_what_is_possible_are_allowed() -> None:
    assert Contract(0.0, max_output_error=0.0).limit("top-1") == Contract(1.0).limit("top-1") - 1 == 0
    assert Contract(p99_ms=1e-9).latency_objection(1.1e-9)


def test_an_output_may_differ_by_what_is_allowed_and_no_more() -> None:
    same, more = (accuracy(unjudged_output="y", unjudged_error=0.1 + extra) for extra in (0.0, 1e-9))
    assert Contract().accuracy_objection(same) == ""
    assert "output 'y' differs by 10.0000001% from the original's, 10% are allowed" in Contract().accuracy_objection(
        more
    )


def test_a_loss_may_exceed_the_limit_by_rounding_only() -> None:
    assert Contract(0.3).accuracy_objection(accuracy(0.6, loss=0.1 + 0.2)) == ""
    assert (
        Contract(0.3)
        .accuracy_objection(accuracy(0.6, loss=0.3 + 1e-9))
        .startswith("loses 30.0000001% top-1, 30.00% are")
    )


def test_faster_by_exactly_one_per_cent_is_not_faster() -> None:
    assert not is_faster(Interval(1.1, 1.01, 1.2))
    assert is_faster(Interval(1.1, 1.0101, 1.2))


def test_samples_cannot_prove_what_the_estimate_denies() -> None:
    contract = Contract(0.01, prove_accuracy=True)
    denied, limit = (accuracy(0.9, loss, 0.02, samples=400, lost=20, won=10) for loss in (0.011, 0.0))
    assert "because the estimate is not below the limit" in contract.accuracy_objection(denied)
    assert "would prove it" in contract.accuracy_objection(limit)
    assert "would prove it" not in Contract(0.01).accuracy_objection(denied)


@pytest.mark.parametrize("limit", [1e-5, 0.0005, 0.0033, 0.004, 0.01, 0.3])
@pytest.mark.parametrize("excess", [1e-8, 1e-5, 0.01])
def test_a_limit_is_never_shown_as_zero_or_as_what_exceeds_it(limit: float, excess: float) -> None:
    found = accuracy(loss=limit + excess)
    far = accuracy(unjudged_output="y", unjudged_error=limit + excess)
    for objection in (
        Contract(limit).accuracy_objection(found),
        Contract(max_output_error=limit).accuracy_objection(far),
    ):
        got, allowed = (float(one) for one in re.findall(r"([0-9.]+)%", objection)[:2])
        assert allowed == pytest.approx(100 * limit)
        assert got > allowed


def test_who_is_certainly_slower_is_told_so() -> None:
    assert unproven_speed("it", Interval(0.8, 0.7, 0.9), "") == "slower than it"
    assert unproven_speed("it", Interval(0.8, 0.7, 0.9), "a job") == (
        "slower than it, measured while the machine was busy (a job)"
    )
    for unsure in (Interval(1.0, 1.0, 1.0), Interval(0.9, 0.7, 1.1), None):
        assert unproven_speed("it", unsure, "") == "not provably faster than it"
        assert unproven_speed("it", unsure, "a job") == "not measurable here, the machine was busy (a job)"


def test_a_bundle_without_a_bound_has_that_of_the_interval() -> None:
    old = accuracy(0.98, 0.004, spread=0.005)
    assert Contract(prove_accuracy=True).bound(old) == pytest.approx(0.009)
    assert Contract(prove_accuracy=True).bound(msgspec.structs.replace(old, bound=0.0)) == 0
    assert Contract().bound(old) == 0.004


@pytest.mark.parametrize(
    ("p99_ms", "needed"), [(0.6, "0.66"), (1.0, "1.1"), (9.1, "11"), (10.0, "11"), (123.4, "140"), (0.00123, "0.0014")]
)
def test_a_hint_adds_a_tenth_and_rounds_up_to_two_digits(p99_ms: float, needed: str) -> None:
    slow = [record("a", p99_ms / 1.5), record("b", 9 * p99_ms)]
    assert unmet(Contract(p99_ms=1e-4), slow).hint.startswith(f"--p99 {needed}ms would suffice (a · FP32 · 1 thread)")


def candidate(name: str, loss: float, error: float = 0.0, **changes: object) -> CandidateRecord:
    return record(
        name, 0.4, accuracy=accuracy(0.9, loss, unjudged_output="y", unjudged_error=error, metric="top-1", **changes)
    )


@pytest.mark.parametrize(
    ("records", "hint"),
    [
        ([candidate("a", 0.03), candidate("b", 0.02)], "--max-accuracy-loss 2.2% would suffice (b · FP32 · 1 thread)"),
        (
            [candidate("a", 0.02, 0.4), candidate("b", 0.02, 0.05)],
            "--max-accuracy-loss 2.2% would suffice (b · FP32 · 1 thread)",
        ),
        (
            [candidate("a", 0.02, 0.4)],
            "--max-accuracy-loss 2.2% --max-output-error 44% would suffice (a · FP32 · 1 thread)",
        ),
        ([candidate("a", 0.0, 0.4)], "--max-output-error 44% would suffice (a · FP32 · 1 thread)"),
        ([candidate("a", 0.95)], "--max-accuracy-loss 100% would suffice (a · FP32 · 1 thread)"),
        (
            [candidate("a", 0.0, broken="NaN"), candidate("b", 0.5)],
            "--max-accuracy-loss 55% would suffice (b · FP32 · 1 thread)",
        ),
        ([candidate("a", 0.0, broken="NaN")], ""),
        ([candidate("a", 1.0, 0.4, broken="NaN")], ""),
        ([candidate("a", 0.01, 0.4)], "--max-output-error 44% would suffice (a · FP32 · 1 thread)"),
        ([candidate("a", 0.02, 0.1)], "--max-accuracy-loss 2.2% would suffice (a · FP32 · 1 thread)"),
        ([candidate("a", 1.0)], "--max-accuracy-loss 100% would suffice (a · FP32 · 1 thread)"),
        ([candidate("a", 1.01)], ""),
        ([candidate("a", 0.0, 1.01)], ""),
    ],
)
def test_the_hint_names_the_candidate_that_needs_least(records: list[CandidateRecord], hint: str) -> None:
    assert unmet(Contract(0.01), records).hint == hint


def test_the_hint_for_fidelity_is_its_own_limit() -> None:
    far = record("a", 0.4, accuracy=accuracy(0.8, 0.2, metric="fidelity"))
    assert unmet(Contract(), [far]).hint == "--max-output-error 22% would suffice (a · FP32 · 1 thread)"


def test_the_nearest_candidate_is_the_quickest_of_the_accurate_ones() -> None:
    error = unmet(Contract(0.01, p99_ms=0.1), [record("a", 3.0), record("b", 2.0), record("c", 1.0, 0.5)])
    assert "the lowest p99 is 1.5 ms" in error.message
    assert error.hint == "--p99 3.3ms would suffice (b · FP32 · 1 thread)"


def test_a_candidate_without_a_latency_or_an_accuracy_was_not_measured() -> None:
    for missing in ({"p99_ms": None}, {"accuracy": None}):
        assert "could be measured" in unmet(Contract(), [record("a", **missing)]).message


def test_without_a_contract_one_point_may_be_lost_on_labels_that_are_not_trusted() -> None:
    contract = Contract()
    assert contract.accuracy_objection(accuracy(0.98, loss=0.01)) == ""
    assert contract.accuracy_objection(accuracy(0.98, loss=0.0101)).startswith("loses 1.01%")
    assert (contract.trust_labels, contract.prove_accuracy) == (False, False)
