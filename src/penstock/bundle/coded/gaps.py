"""Sparse positions as gaps (Han et al. 2016, §2): the number of zeros before each value, in a few bits.

A gap of ``2 ** bits - 1`` or more is written with fillers. Each filler represents ``2 ** bits - 1`` zeros and no value.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import IntegrityError
from penstock.tensor import Array

MAX_BITS = 12


def to_gaps(positions: Array, bits: int) -> Array:
    """Encode the ascending ``positions`` of the values as gap symbols (int64). The filler is ``2 ** bits - 1``."""
    filler = (1 << bits) - 1
    zeros = np.diff(positions, prepend=-1) - 1
    fillers, rest = np.divmod(zeros, filler)
    ends = (fillers + 1).cumsum()
    symbols = np.full(int(ends[-1]) if len(ends) else 0, filler, np.int64)
    symbols[ends - 1] = rest
    return symbols


def to_positions(symbols: Array, bits: int, values: int, count: int) -> Array:
    """Decode ``symbols`` into positions (int64). Raises IntegrityError unless there are ``values`` positions, all below ``count``."""
    filler = (1 << bits) - 1
    steps = symbols.astype(np.int64)
    is_value = steps != filler
    steps += is_value
    positions = steps.cumsum()[is_value] - 1
    fits = len(positions) == values and (not values or positions[-1] < count)
    if not fits or (len(symbols) and not is_value[-1]):
        raise IntegrityError("a tensor of the coded model has invalid positions")
    return np.asarray(positions)
