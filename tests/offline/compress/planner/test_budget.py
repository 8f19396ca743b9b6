from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bundle.evidence import Accuracy
from penstock.measurement import Interval
from penstock.offline.compress.planner.budget import Spending
from penstock.offline.compress.table import Kind
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.intervals import loss_bound, loss_interval, tail
from penstock.offline.judge.sample_size import samples_needed

KINDS: tuple[Kind, ...] = ("structure", "sparsity", "precision", "sharing")


def accuracy(loss: float, samples: int = 1000) -> Accuracy:
    return Accuracy("top-1", 0.9 - loss, Interval(loss, loss - 0.01, loss + 0.01), 0.1, samples)


def test_later_kinds_find_something_left() -> None:
    spending = Spending(Contract(0.01), 10)
    allowed = [spending.allowance(kind).max_accuracy_loss for kind in KINDS]
    assert allowed == sorted(allowed)
    assert 0 < allowed[0] < 0.01
    assert allowed[-1] == 0.01


@given(st.sampled_from(KINDS), st.floats(1e-6, 1) | st.just(0.0), st.integers(1, 5000), st.booleans())
def test_one_sample_may_be_lost_where_less_cannot_be_measured(
    kind: Kind, loss: float, samples: int, prove: bool
) -> None:
    spending = Spending(Contract(loss, prove_accuracy=prove), 10, samples)
    smooth = Spending(Contract(loss), 10).allowance(kind).max_accuracy_loss
    allowed = spending.allowance(kind)
    if loss == 0:
        assert allowed.max_accuracy_loss == 0
    else:
        assert allowed.max_accuracy_loss == max(smooth, 1 / samples)
        assert not Contract(allowed.max_accuracy_loss).accuracy_objection(accuracy(1 / samples, samples))
    assert not allowed.prove_accuracy or prove


def test_less_than_a_sample_is_one_sample() -> None:
    contract = Spending(Contract(0.01), 10, 75).allowance("structure")
    assert not contract.accuracy_objection(accuracy(1 / 75, 75))
    assert contract.accuracy_objection(accuracy(2 / 75, 75))
    assert Spending(Contract(0.01), 10, 4000).allowance("structure").accuracy_objection(accuracy(30 / 4000, 4000))


def test_proof_is_demanded_where_there_are_samples_for_it() -> None:
    contract = Contract(0.01, prove_accuracy=True)
    needed = samples_needed(0.009, changed=0.0)
    assert needed is not None
    few, enough = (Spending(contract, 10, count).allowance("precision") for count in (needed - 1, needed))
    assert (few.prove_accuracy, enough.prove_accuracy) == (False, True)
    bound = loss_bound(needed, 0, 0, tail())
    assert not enough.accuracy_objection(Accuracy("top-1", 1.0, loss_interval(needed, 0, 0), 0.0, needed, bound))


def test_fidelity_has_an_allowance_of_the_output_error() -> None:
    spending = Spending(Contract(max_output_error=0.1), 10)
    allowed = [spending.allowance(kind).max_output_error for kind in KINDS]
    assert allowed == sorted(allowed)
    assert (allowed[0], allowed[-1]) == (pytest.approx(0.06), 0.1)
    assert (
        spending.account(Accuracy("fidelity", 0.96, Interval(0.04, 0, 1), 0.1, 50))
        == "4.00% spent of 10.00%, 6.00% left"
    )


def test_the_account_tells_what_is_spent_and_left() -> None:
    spending = Spending(Contract(0.01), 10)
    assert spending.account(accuracy(0.004)) == "0.40% spent of 1.00%, 0.60% left"
    assert spending.account(accuracy(-0.125)) == "0.00% spent of 1.00%, 1.00% left; 12.50% gained"
    assert spending.account(accuracy(0.0)) == "0.00% spent of 1.00%, 1.00% left"
    few = Spending(Contract(0.01), 10, 75)
    assert few.account(accuracy(1 / 75, 75)) == "1.33% spent of 1.00%: one sample of 75, the smallest measurable loss"
    assert few.account(accuracy(0.0, 75)).endswith("1.00% left")


def test_time() -> None:
    spending = Spending(Contract(), 10)
    assert not spending.is_over(9.9)
    assert spending.is_over(10)
    assert spending.is_over(6, share=0.6)
    assert not spending.is_exceeded(39.9)
    assert spending.is_exceeded(40)
    assert not Spending(Contract(), 600).is_exceeded(899)
    assert Spending(Contract(), 600).is_exceeded(900)
