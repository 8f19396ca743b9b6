"""Differences between two models' outputs on the same samples: errors, divergence, and confidence intervals of means."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.measurement import Interval
from penstock.tensor import Array

Outputs = dict[str, Array]
"""Outputs by name, with one row per sample."""

_Z95 = 1.959964
_TAIL = 0.025
"""The probability on each side of a 95 % interval."""
_TINY, _HUGE = 1e-150, 1e150
"""Sums of squares are limited to this range, so that their quotients and totals are finite."""
_BLOCK = 1 << 19
"""Number of elements that are compared at a time, so that copies of them in FP64 need little memory."""
_NEGLIGIBLE = 1e-6
"""Elements smaller than this count as zero."""
_WORST = 1e6
"""Upper limit of a relative error."""
_LEAST_SPREAD = 1e-4
"""Minimum spread of rows, relative to their norm, so that rounding of a constant output does not count as an error."""
_LEAST_SHARE = 1e-12
"""Lower limit of a probability, so that the divergence of one sample is at most 28."""


def matched_pairs(count: int, total: float, squares: float) -> Interval:
    """The approximate 95 % interval of the mean of ``count`` independent paired differences, from their sum ``total`` and sum of
    squares ``squares``. Only the search uses this interval; the contract uses the bounds in ``intervals.py``.

    1. Usually it is the adjusted Wald interval for matched pairs of Agresti and Min (2005), plus half a lost and half a won sample.
    2. If no pair differs, the Wald interval is too narrow. The exact bound of Clopper and Pearson (1934) for the rate of pairs that
       differ then limits the loss in both directions.
    """
    if not squares:
        bound = 1 - _TAIL ** (1 / count)
        return Interval(0.0, -bound, bound)
    n = count + 2.0
    centre, spread = total / n, _Z95 * (squares + 1 - total**2 / n) ** 0.5 / n
    return Interval(total / count, centre - spread, centre + spread)


def mean_interval(values: Array) -> Interval:
    """The mean of ``values`` with its normal 95 % interval. For a single value, the interval is wide but finite, as JSON requires."""
    values = values.astype(np.float64)
    spread = _Z95 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else _WORST
    mean, spread = float(values.mean()), min(spread, _WORST)
    return Interval(mean, mean - spread, mean + spread)


def sample_errors(reference: Mapping[str, Array], outputs: Mapping[str, Array]) -> Array:
    """Relative error of each sample's worst output: the norm of the difference divided by the norm of the reference, at most 1.

    The error is 1 if a sample has NaN or infinity at a place where the reference is finite. A reference's norm counts as at least 1 %
    of the output's mean norm, so that a reference near zero does not exaggerate the error.
    """
    errors = []
    for name, want in reference.items():
        difference, norm = _squares(want, outputs[name])
        errors.append(np.sqrt(difference / np.maximum(norm, 1e-4 * norm.mean())))
    return np.asarray(np.max(errors, axis=0).clip(max=1.0))


def output_errors(reference: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, float]:
    """Relative error of each output over all samples. The error is always finite, because the manifest stores it as JSON."""
    errors = {}
    for name, want in reference.items():
        difference, norm = _squares(want, outputs[name])
        errors[name] = min(float(np.sqrt(difference.sum() / norm.sum())), _WORST)
    return errors


def deviations(reference: Array, output: Array) -> Array:
    """The difference of each row from the reference's row, relative to the spread of the reference's rows. For text and integers, the
    difference is the proportion of unequal elements.

    If rows are numbers or vectors, the spread is measured from the mean row, so that a large offset does not hide an error. For other
    tensors, the spread is the root mean square norm. A NaN or infinity counts as a difference of at least the spread.
    """
    if not reference.size:
        return np.zeros(len(reference))
    if reference.dtype.kind in "OSUiub":
        return np.asarray((reference != output).reshape(len(reference), -1).mean(axis=1), np.float64)
    difference, norm = _squares(reference, output)
    spread = norm.mean()
    if reference.ndim <= 2 and len(reference) > 1:
        rows = np.where(np.isfinite(reference), reference, 0).reshape(len(reference), -1).astype(np.float64)
        spread = max(((rows - rows.mean(axis=0)) ** 2).sum() / (len(rows) - 1), _LEAST_SPREAD**2 * spread)
    return np.asarray(np.sqrt(difference / spread))


def share_of_few(reference: Array) -> float:
    """The share of the squared spread of the reference's rows that the twentieth of the rows furthest from the mean row makes up, at
    least one row. Of equal rows, 0.
    """
    rows = np.where(np.isfinite(reference), reference, 0).reshape(len(reference), -1).astype(np.float64)
    far = np.sort(((rows - rows.mean(axis=0)) ** 2).sum(axis=1))
    return float(far[-max(1, len(far) // 20) :].sum() / total) if (total := far.sum()) > 0 else 0.0


def share_divergence(reference: Array, outputs: Array) -> Array:
    """KL(reference‖outputs) of each row's class probabilities: the scores, after softmax unless they already are probabilities."""
    are_shares = _are_shares(reference)
    want, got = (_log_shares(array, are_shares) for array in (reference, outputs))
    return np.asarray((np.exp(want) * (want - got)).sum(axis=1))


def _squares(want: Array, got: Array) -> tuple[Array, Array]:
    """For each sample, the sum of squared differences and the sum of squares of the reference. Unequal texts have the difference 1.

    If NaN and infinities are in the same places, they add no difference. Otherwise the difference of the sample equals its norm.
    """
    rows, got = want.reshape(len(want), -1), got.reshape(len(want), -1)
    if want.dtype.kind in "OSU":
        return (got != rows).sum(axis=1).astype(np.float64), np.full(len(rows), float(max(1, rows.shape[1])))
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    parts = [_finite_squares(rows[n : n + step], got[n : n + step]) for n in range(0, max(1, len(rows)), step)]
    difference, norm, broken = (np.concatenate(part) for part in zip(*parts, strict=True))
    # A rounding error relative to a reference of zeros is not an error.
    norm = np.clip(norm, max(_TINY, _NEGLIGIBLE**2 * rows.shape[1]), _HUGE)
    return np.where(broken, np.maximum(difference, norm), difference).clip(max=_HUGE), norm


def _finite_squares(want: Array, got: Array) -> tuple[Array, Array, Array]:
    """For each row, the sums of squares of the differences and of ``want``, where these are finite, and whether it has a NaN or
    infinity that only one of them has.
    """
    want, got = want.astype(np.float64), got.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        difference, broken = got - want, np.zeros(len(want), np.bool_)
        finite = np.isfinite(difference)
        if not finite.all():
            broken = (~finite & (got != want) & ~(np.isnan(got) & np.isnan(want))).any(axis=1)
            difference[~(np.isfinite(got) & np.isfinite(want))] = 0.0
            want[~np.isfinite(want)] = 0.0
        return np.square(difference).sum(axis=1), np.square(want).sum(axis=1), broken


def _are_shares(scores: Array) -> bool:
    return bool((scores >= 0).all() and np.allclose(scores.astype(np.float64).sum(axis=1), 1, atol=1e-3))


def _log_shares(scores: Array, are_shares: bool) -> Array:
    """Logarithms of each row's probabilities, which are raised to at least ``_LEAST_SHARE``. In a row with NaN or infinity, every
    probability is this minimum.
    """
    scores = scores.astype(np.float64)
    broken = ~np.isfinite(scores).all(axis=1, keepdims=True)
    scores = np.where(broken, 0.0, scores)
    if not are_shares:
        shifted = scores - scores.max(axis=1, keepdims=True)
        shares = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    else:
        shares = scores
    return np.asarray(np.log(np.where(broken, _LEAST_SHARE, np.clip(shares, _LEAST_SHARE, None))))
