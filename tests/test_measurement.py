from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from penstock.measurement import Conditions, percent, percent_beside, student


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8, 19, 400])
@pytest.mark.parametrize("probability", [0.6, 0.9, 0.975, 0.9999])
def test_students_quantiles_are_exact(freedom: int, probability: float) -> None:
    assert student(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-6)


@pytest.mark.parametrize("freedom", [1, 2, 5, 12])
def test_students_quantiles_rise_from_zero(freedom: int) -> None:
    quantiles = [student(probability, freedom) for probability in (0.5, 0.6, 0.9, 0.99, 0.999)]
    assert quantiles == sorted(quantiles)
    assert quantiles[0] == pytest.approx(0, abs=1e-6)
    assert student(0.75, 1) == pytest.approx(1)
    assert student(0.75, 2) == pytest.approx(math.sqrt(2 / 3))


def test_a_disturbance_is_named_by_its_cause() -> None:
    assert Conditions(0.1, 0.2, 0.0, dirty=False).disturbance == ""
    assert Conditions(4.0, 0.2, 0.0, dirty=True).disturbance == "load 4 before, 0 % of the time stolen"
    assert Conditions(0.1, 0.2, 0.0, dirty=True, busy="other processes used 1.0 of 2 cores").disturbance == (
        "other processes used 1.0 of 2 cores"
    )


@given(st.floats(1e-7, 1.0), st.integers(0, 3))
def test_a_percentage_is_exact_to_four_digits_and_never_zero(share: float, decimals: int) -> None:
    assert float(percent(share, decimals)[:-1]) / 100 == pytest.approx(share, rel=1.1e-4)
    assert len(percent(share, decimals).partition(".")[2][:-1]) >= decimals


@given(st.sampled_from([0.0, 0.005, 0.01, 0.1]), st.floats(1e-8, 0.5))
def test_a_percentage_beside_its_limit_differs_from_it(limit: float, excess: float) -> None:
    assert float(percent_beside(limit + excess, limit)[:-1]) / 100 > limit
    assert percent_beside(limit, limit) == f"{limit:.2%}"
