"""Confidence bounds that are valid for any number of samples, and an approximate bound for metrics that are not means.

::

    rate of hits          test of paired counts                             exact
    mean of bounded rows  bets against the mean                             valid for any distribution
    other metrics         jackknife over groups of rows                     approximate

"Exact" and "valid" mean that, for any number of samples, the bound is wrong with at most the given probability. Samples must be
independent. ``tail`` is the probability that a one-sided bound is wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from penstock.measurement import Interval, student
from penstock.tensor import Array

CONFIDENCE = 0.95
_NUISANCE = 0.002
"""The part of the tail for the case that the rate of wins is outside its interval (R. Berger, D. Boos, *JASA* 89, 1994)."""
_RATES = 33
"""Number of rates of wins among which the test seeks its maximum."""
_FINER = 17
"""Number of rates between the neighbours of the best of these, where the test is evaluated again."""
_SPREADS = 6.5
"""Counts above the mean by more than this many standard deviations plus this number, with a probability below 1e-8, are left out."""
_MAX_CELLS = 1 << 19
"""With more contingency tables than this, the two rates are bounded separately. That bound is looser but takes little memory."""
_TOLERANCE = 1e-5
_EDGE = 1e-12
"""Minimum probability of an outcome, so that its logarithm is finite."""
_BETS = 2.0 ** -np.arange(0, 16)
"""Sizes of the bets, as fractions of the largest possible bet."""
GROUPS = 20
"""Number of groups of rows in the jackknife."""


def tail(looks: int = 1) -> float:
    """The allowed probability that a one-sided bound is wrong. ``looks`` bounds must be valid together (Bonferroni)."""
    return (1 - CONFIDENCE) / looks


def rate_bound(count: int, samples: int, probability: float) -> float:
    """The upper bound of a rate, if ``count`` of ``samples`` are hits (C. Clopper, E. Pearson, *Biometrika* 26, 1934)."""
    if count >= samples:
        return 1.0
    logs = _log_factorials(samples)[[samples]] - _log_factorials(samples)[: count + 1]
    logs = logs - _log_factorials(samples)[samples - np.arange(count + 1)]
    hits = np.arange(count + 1)

    def is_likely(rate: float) -> bool:
        return float(np.exp(logs + hits * math.log(rate) + (samples - hits) * math.log1p(-rate)).sum()) > probability

    return _bisect(is_likely, count / samples, 1.0, 1e-9)


def loss_interval(samples: int, lost: int, won: int, looks: int = 1) -> Interval:
    """The mean loss with its two-sided interval. ``lost`` samples became wrong, and ``won`` samples became right."""
    half = tail(looks) / 2
    return Interval((lost - won) / samples, -loss_bound(samples, won, lost, half), loss_bound(samples, lost, won, half))


@functools.lru_cache(1 << 14)
def loss_bound(samples: int, lost: int, won: int, probability: float) -> float:
    """The upper bound of a loss: the rate of ``lost`` minus the rate of ``won`` among ``samples`` paired samples.

    If there are more than ``_MAX_CELLS`` contingency tables, returns a looser bound: the upper bound of the rate of ``lost`` minus the
    lower bound of the rate of ``won``.
    """
    wide = rate_bound(lost, samples, probability / 2) - 1 + rate_bound(samples - won, samples, probability / 2)
    if _is_large(samples, lost, won):
        return wide
    high = wide if proves_loss(samples, lost, won, wide, probability) else 1.0
    return _bisect(
        lambda loss: not proves_loss(samples, lost, won, loss, probability),
        (lost - won) / samples,
        high,
        _TOLERANCE,
    )


def proves_loss(samples: int, lost: int, won: int, limit: float, probability: float) -> bool:
    """True if the counts prove a loss below ``limit``: for a loss of ``limit`` or more, so good counts have at most ``probability``.

    Counts are ordered by their likelihood ratio. The probability is exact: the maximum over all rates of wins that fit ``won``.
    """
    if (lost - won) / samples >= limit or limit >= 1:
        return limit >= 1 and lost < samples
    if _is_large(samples, lost, won):
        return loss_bound(samples, lost, won, probability) <= limit
    ignored = _NUISANCE * probability
    top = (1 - limit) / 2 - _EDGE
    most = min(rate_bound(won, samples, ignored / 2), top)
    least = min(1 - rate_bound(samples - won, samples, ignored / 2), most)
    rates = np.linspace(max(least, -limit), most, _RATES).clip(max(0.0, -limit) + _EDGE, top)
    b = np.arange(_last(samples, rates[-1] + limit) + 1)[:, None]
    c = np.arange(_last(samples, rates[-1]) + 1)[None, :]
    seen = _score(samples, np.array(lost), np.array(won), limit)
    rows, columns = np.nonzero((_score(samples, b, c, limit) <= seen + 1e-9) & (b + c <= samples))
    logs = _log_factorials(samples)
    ways = logs[samples] - logs[rows] - logs[columns] - logs[samples - rows - columns]
    counts = np.stack([rows, columns, samples - rows - columns]).astype(np.float64)

    def chances(rates: Array) -> Array:
        logs = np.log(np.stack([rates + limit, rates, 1 - 2 * rates - limit], axis=1))
        return np.asarray(np.exp(logs @ counts + ways).sum(axis=1))

    found = chances(rates)
    if found.max() + ignored > probability:
        return False
    # The maximum may lie between two of the rates, which would understate it by up to 5 %.
    best = int(found.argmax())
    near = np.linspace(rates[max(best - 1, 0)], rates[min(best + 1, _RATES - 1)], _FINER)
    return float(chances(near).max()) + ignored <= probability


def mean_bound(values: Array, probability: float, most: float = 1.0) -> float:
    """The upper bound of the mean of independent ``values`` that are at most ``most``.

    The bound is the smallest mean that no mixture of bets refutes (I. Waudby-Smith, A. Ramdas, *JRSS B* 86, 2024). If the mean is
    ``m``, the wealth ``prod(1 + bet * (m - value))`` has the expectation 1, so it seldom exceeds ``1 / probability`` (Markov).
    """
    values = values.astype(np.float64)

    def is_likely(mean: float) -> bool:
        stakes = _BETS / (most - mean)
        with np.errstate(divide="ignore"):
            wealth = np.log((1 + stakes[:, None] * (mean - values)).clip(min=0)).sum(axis=1)
        return float(np.logaddexp.reduce(wealth)) - math.log(len(_BETS)) < -math.log(probability)

    return _bisect(is_likely, float(values.mean()), most, _TOLERANCE)


def bets_needed(limit: float, mean: float, spread: float, probability: float, most: float = 1.0) -> int | None:
    """Estimate how many values with this ``mean`` and standard deviation ``spread`` make ``mean_bound`` at most ``limit``.

    The estimate expands the mean growth of the log wealth to the second order. If ``spread`` is 0, it is exact. None if no bet wins.
    """
    if mean >= limit or limit >= most:
        return None
    stakes = _BETS / (most - limit)
    gain = 1 + stakes * (limit - mean)
    growth = float((np.log(gain) - (stakes * spread / gain) ** 2 / 2).max())
    return math.ceil(math.log(len(_BETS) / probability) / growth) if growth > 0 else None


def bounded_interval(values: Array, looks: int = 1, least: float = -1.0, most: float = 1.0) -> Interval:
    """The mean of ``values``, which lie between ``least`` and ``most``, with its two-sided interval by ``mean_bound``."""
    half = tail(looks) / 2
    return Interval(float(values.mean()), -mean_bound(-values, half, -least), mean_bound(values, half, most))


def jackknife_interval(
    statistic: Callable[[Array], float], samples: int, looks: int = 1, scale: float = 1.0
) -> Interval:
    """``statistic`` of all rows with an approximate two-sided interval. The jackknife leaves out groups of rows in turn.

    ``statistic`` takes row numbers; NaN means undefined. The interval always allows for one unseen kind of row, which could change
    the statistic by ``scale``. For a single row, the interval extends nearly ``scale`` to both sides. If the statistic is undefined
    without some group, it extends at least ``scale``.
    """
    value, groups = statistic(np.arange(samples)), min(GROUPS, samples)
    half = tail(looks) / 2
    spread = 0.0
    if groups > 1:
        number = np.arange(samples) % groups
        parts = np.array([statistic(np.flatnonzero(number != one)) for one in range(groups)])
        is_defined = np.isfinite(parts)
        parts = parts[is_defined] if is_defined.any() else np.array([value])
        spread = student(1 - half, groups - 1) * math.sqrt(
            (groups - 1) / groups * float(((parts - parts.mean()) ** 2).sum())
        )
        if not is_defined.all():
            spread = max(spread, scale)
    unseen = scale * (1 - half ** (1 / samples))
    spread = max(spread, unseen)
    return Interval(value, value - spread, value + spread)


def _score(samples: int, lost: Array, won: Array, limit: float) -> Array:
    """The signed root of the likelihood ratio between the observed rates and the most likely rates with a loss of ``limit``.

    T. Tango (*Statistics in Medicine* 17, 1998) gives the most likely rates with that loss.
    """
    a, c = 2.0 * samples, -won * limit * (1 - limit)
    b = -lost - won + (2.0 * samples - lost + won) * limit
    rate = ((np.sqrt((b * b - 4 * a * c).clip(min=0)) - b) / (2 * a)).clip(max(0.0, -limit), (1 - limit) / 2)
    parts = (lost, rate + limit), (won, rate), (samples - lost - won, 1 - 2 * rate - limit)
    ratio = sum(np.where(k > 0, k * np.log(np.maximum(k, 1) / samples / np.maximum(p, _EDGE)), 0.0) for k, p in parts)
    return np.asarray(np.sign(lost - won - samples * limit) * np.sqrt(2 * np.maximum(ratio, 0)))


def _last(samples: int, rate: float) -> int:
    mean = samples * rate
    return int(min(samples, math.ceil(mean + _SPREADS * math.sqrt(mean) + _SPREADS)))


def _is_large(samples: int, lost: int, won: int) -> bool:
    lost, won = (_last(samples, rate_bound(count, samples, 1e-4)) for count in (max(lost, won), won))
    return lost * won > _MAX_CELLS


@functools.lru_cache(4)
def _log_factorials(samples: int) -> Array:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, samples + 1)))])


def _bisect(is_below: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """The smallest value, rounded up, at which ``is_below`` is False; ``high`` if it is always True."""
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high
