"""Compares a constant with a weight in every order of the weight's axes, because exporters transpose and reshape weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from penstock.tensor import Array

_MOST_AXES = 5
_SAMPLE = 256
"""Number of values that show whether an order of the axes is the right one."""
_PLAUSIBLE = 0.25
"""Least part of the sample that must be equal."""
_ROUNDING = 1e-5
"""Relative rounding error of a computed value."""
_LEVEL = 0.3
"""Part of the largest value that is added to each value, because the rounding of a value near 0 depends on the others."""
_OUTLYING = 100.0
"""A difference that exceeds the upper quartile of all differences so many times is no rounding error."""

_MOST_ROUNDING = 0.1
"""Largest relative difference that can be rounding, as in the sine of a large angle."""


def is_same(ours: Array, theirs: Array, *, is_exact: bool) -> bool:
    """True if the arrays have the same values in some order of the axes. Unless ``is_exact``, rounding may differ."""
    flat = ours.reshape(-1)
    if is_exact and _fingerprint(ours) != _fingerprint(theirs):
        return False
    return any(not differences(flat, laid, is_exact=is_exact).any() for laid in layouts(theirs, flat))


def layouts(array: Array, flat: Array) -> Iterator[Array]:
    """``array`` as a vector, in the orders of its axes in which it is similar to ``flat``."""
    if array.size != flat.size:
        return
    squeezed = array.squeeze()
    axes = range(squeezed.ndim)
    places = np.linspace(0, flat.size - 1, min(_SAMPLE, flat.size)).astype(np.int64)
    ours = flat[places]
    for order in permutations(axes) if squeezed.ndim <= _MOST_AXES else (tuple(axes),):
        turned = squeezed.transpose(order)
        theirs = turned[np.unravel_index(places, turned.shape)] if turned.ndim else turned.reshape(-1)
        if np.count_nonzero(~differences(ours, theirs, is_exact=False)) >= _PLAUSIBLE * len(places):
            yield turned.reshape(-1)


def differences(ours: Array, theirs: Array, *, is_exact: bool) -> Array:
    """Which values differ. Unless ``is_exact``, by more than rounding."""
    if is_exact or ours.dtype.kind != "f":
        found: Array = ours != theirs
        return found & ~(np.isnan(ours) & np.isnan(theirs)) if ours.dtype.kind == "f" else found
    one, other = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(other)
    scale = np.abs(other) + _LEVEL * np.abs(other[finite]).max(initial=0.0)
    with np.errstate(all="ignore"):
        error = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other) / scale)
    rounding = max(_ROUNDING, 4 * float(np.finfo(ours.dtype).eps))
    limit = max(rounding, min(_OUTLYING * float(np.quantile(error, 0.75)), _MOST_ROUNDING))
    return ~(error <= limit)


def is_folded(ours: Array, theirs: Array, groups: int) -> bool:
    """True if each row or each column is a multiple of the weight's, or if the weight is a bias, which becomes any other one.

    A transposed convolution has a column of its own for each group of rows.
    """
    if groups > 1:
        ours, theirs = (np.concatenate(np.split(each, groups), axis=1) for each in (ours, theirs))
    for axis in range(2 if ours.ndim > 1 else 0):
        one, other = (np.moveaxis(each, axis, 0).reshape(each.shape[axis], -1).astype(float) for each in (ours, theirs))
        factors = (one * other).sum(1, keepdims=True) / np.maximum((other * other).sum(1, keepdims=True), 1e-300)
        if np.allclose(one, factors * other, rtol=_ROUNDING, atol=_ROUNDING * np.abs(one).max()):
            return True
    return ours.ndim == 1


def _fingerprint(array: Array) -> tuple[int, int]:
    """Equal for two arrays of one type that have the same values in any order."""
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").astype(np.uint64)
    return int(bits.sum()), int((bits * bits).sum())
