"""Finds errors that many values of a tensor have in common, such as a gain or a bias. Each value's own error may be larger.

1. The error of a tensor is reduced to a few *means*: of all values and of each slice of each axis, also weighted by the values, which
   gives the slope of the error.
2. Noisy runs of the graph give the means that rounding alone produces. Values that depend on each other are so accounted for.
3. A mean beyond ``_DEVIATIONS`` standard deviations is systematic. So is an error whose root mean square exceeds that of all runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.tensor import Array

_DEVIATIONS = 4.0
"""Of noise that is two or three times that of a framework."""
_LEAST_VALUES = 4
"""Smaller slices have no mean that says more than their values."""
_OUTLIERS = 99.0
"""Percentile of the noise beyond which a value is an outlier, such as one that a tie changes."""
_TIMES = 1.5
"""Allowed multiple of the noise, as for the errors of single values."""
_POOLED = 0.5
"""Part of the deviation of all slices that a slice has at least, because a few runs can agree by chance."""


class Systematic(NamedTuple):
    """The result for one tensor."""

    reason: str
    """Describes the systematic error; empty if rounding explains it."""
    gain: float
    """The smallest gain of the whole tensor that would have been found, 0.01 for one percent. 0 if there is an error."""


def systematic(error: Array, exact: Array, runs: Sequence[Array], compared: Array, *, stepped: bool) -> Systematic:
    """Find the systematic part of ``error``, the source minus the ONNX model.

    ``runs`` are noisy values of the tensor whose values without rounding are ``exact``. With ``stepped``, the
    values are quantised. Integer kernels round ties in one direction, which is a bias wherever a slice has few different values,
    so that only the whole tensor counts.
    """
    noises = [np.where(compared & np.isfinite(one - exact), one - exact, 0.0) for one in runs]
    if not noises or error.size < _LEAST_VALUES:
        return Systematic("", np.inf)
    sizes = np.abs(noises)
    bound = _TIMES * (float(np.percentile(sizes, _OUTLIERS)) or float(sizes.max()))
    error, *noises = (np.clip(one, -bound, bound) for one in (error, *noises))
    values = np.where(compared & np.isfinite(exact), exact, 0.0)
    allowed = _TIMES * max(_size(one) for one in noises)
    if (found := _size(error)) > allowed:
        return Systematic(f"differs by {found:.2g} in the root mean square, and rounding explains {allowed:.2g}", 0.0)
    gain = np.inf
    for what, weights in (("mean", np.ones(values.shape)), ("slope", values)):
        is_centred = what == "slope"  # so that a bias is no slope
        expected = [list(_means(one, weights, sliced=not stepped, is_centred=is_centred)) for one in noises]
        for at, means in enumerate(_means(error, weights, sliced=not stepped, is_centred=is_centred)):
            deviation = np.sqrt(np.mean([run[at] ** 2 for run in expected], axis=0))
            allowed = _DEVIATIONS * np.maximum(deviation, _POOLED * np.sqrt(np.mean(deviation**2)))
            if what == "slope" and not at:
                gain = float(allowed[0])
            if (beyond := np.abs(means) > allowed).any():
                worst = int(np.argmax(np.where(beyond, np.abs(means) - allowed, 0.0)))
                told = f"the {what} of its errors is {means[worst]:.2g}, and rounding explains {allowed[worst]:.2g}"
                return Systematic(f"differs systematically: {told}", 0.0)
    return Systematic("", gain)


def _means(error: Array, weights: Array, *, sliced: bool, is_centred: bool) -> Iterator[Array]:
    """The weighted mean of all errors, and those of the slices of each axis."""
    every = tuple(range(error.ndim))
    for axes in (every, *(every[:axis] + every[axis + 1 :] for axis in every if sliced)):
        if np.prod([error.shape[axis] for axis in axes]) >= _LEAST_VALUES:
            used = weights - weights.mean(axis=axes, keepdims=True) if is_centred else weights
            total = np.sum(used * used, axis=axes)
            yield np.atleast_1d(np.sum(error * used, axis=axes) / np.where(total > 0, total, 1.0))


def _size(one: Array) -> float:
    return float(np.sqrt(np.mean(one**2)))
