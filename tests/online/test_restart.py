from __future__ import annotations

import pytest

from penstock.online.restart import restart_delay_s


@pytest.mark.parametrize(
    ("deaths", "delay_s"),
    [([], 0), ([0.0], 0), ([100.0], 0), ([99.0, 100.0], 0.5), ([98.0, 99.0, 100.0], 1), ([40.0, 99.0, 100.0], 0.5)],
)
def test_a_lone_death_costs_nothing_and_deaths_within_a_minute_double(deaths: list[float], delay_s: float) -> None:
    assert restart_delay_s(deaths, 100.0) == delay_s


def test_the_delay_is_bounded() -> None:
    assert restart_delay_s([100.0] * 1000, 100.0) == 30
