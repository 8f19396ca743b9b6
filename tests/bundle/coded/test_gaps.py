from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bundle.coded.gaps import to_gaps, to_positions
from penstock.errors import IntegrityError


@given(st.sets(st.integers(0, 3000), max_size=60), st.integers(1, 12))
def test_positions_come_back(positions: set[int], bits: int) -> None:
    rising = np.array(sorted(positions), np.int64)
    symbols = to_gaps(rising, bits)
    assert symbols.min(initial=0) >= 0
    assert symbols.max(initial=0) < 1 << bits
    assert to_positions(symbols, bits, len(rising), 3001).tolist() == rising.tolist()


def test_a_gap_beyond_the_greatest_takes_fillers() -> None:
    # 3 bits: 7 is the filler, for seven zeros without a value.
    assert to_gaps(np.array([0, 1, 8, 16, 40]), 3).tolist() == [0, 0, 6, 7, 0, 7, 7, 7, 2]


@pytest.mark.parametrize(
    ("symbols", "values", "count"),
    [
        ([1, 1], 2, 3),  # beyond the end
        ([1, 1], 3, 9),  # too few
        ([1, 1], 1, 9),  # too many
        ([1, 7], 1, 99),  # a filler at the end
        ([7], 0, 99),
    ],
)
def test_what_does_not_fit_is_refused(symbols: list[int], values: int, count: int) -> None:
    with pytest.raises(IntegrityError, match="positions"):
        to_positions(np.array(symbols), 3, values, count)
