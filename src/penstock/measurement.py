"""Types for measurements: estimates with intervals, latency profiles, and machine load. Also Student's quantiles."""

from __future__ import annotations

import functools
import math

import msgspec

_TOLERANCE = 1e-12
_MOST_DECIMALS = 12


class Interval(msgspec.Struct, frozen=True):
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float


class LatencyPoint(msgspec.Struct, frozen=True):
    """Latency of one forward call at one batch size, in milliseconds."""

    batch: int
    p50_ms: float
    p99_ms: float


class Conditions(msgspec.Struct, frozen=True):
    """The load of the machine during a measurement."""

    load_before: float
    load_after: float
    steal_percent: float
    dirty: bool
    """True if the measurements are unreliable because of other work on the machine."""
    busy: str = ""
    """The other processes that disturbed the timing of candidates, as text; empty if there were none."""

    @property
    def disturbance(self) -> str:
        """The cause of disturbed measurements, as text; empty if there is none."""
        if not self.dirty:
            return ""
        return self.busy or f"load {self.load_before:g} before, {self.steal_percent:g} % of the time stolen"


def times(ratio: Interval) -> str:
    """Format a ratio with its interval."""
    return f"{ratio.value:.2f}x ({ratio.low:.2f} … {ratio.high:.2f})"


def percent(share: float, decimals: int = 2) -> str:
    """Format ``share`` in per cent, with ``decimals`` decimals or, if necessary, with more to show four significant digits."""
    digits = decimals
    while digits < _MOST_DECIMALS and not math.isclose(_shown(share, digits), share, rel_tol=1e-4):
        digits += 1
    return f"{share:.{digits}%}"


def percent_beside(share: float, limit: float, decimals: int = 2) -> str:
    """Format ``share`` in per cent, with ``decimals`` decimals or, if necessary, with more to show that it differs from ``limit``."""
    for digits in range(decimals, _MOST_DECIMALS):
        shown = _shown(share, digits)
        is_apart = (shown > limit) == (share > limit) and not math.isclose(shown, limit, rel_tol=1e-9)
        if share == limit or is_apart:
            break
    return f"{share:.{digits}%}"


def _shown(share: float, digits: int) -> float:
    return float(f"{share:.{digits}%}"[:-1]) / 100


@functools.lru_cache(1 << 10)
def student(probability: float, freedom: int) -> float:
    """The quantile of Student's t-distribution for ``probability`` ≥ 0.5.

    With a whole number of degrees of freedom, the distribution function is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, math.pi / 2
    while high - low > _TOLERANCE:
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, freedom) < 2 * probability - 1 else (low, angle)
    return math.tan(high) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The probability that a value is within tan(angle) × √freedom of zero."""
    is_odd = freedom % 2
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = cosine if is_odd else 1.0, 0.0
    for power in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (power - 1) / power
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
