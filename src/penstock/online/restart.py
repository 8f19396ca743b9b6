"""Computes how long the restart of a dead process is delayed."""

from __future__ import annotations

from collections.abc import Sequence

CALM_S = 60.0
"""Seconds during which a death affects the delay."""
_MAX_DELAY_S = 30.0


def restart_delay_s(deaths: Sequence[float], now: float) -> float:
    """Seconds to wait after the last death. ``deaths`` are the times, in seconds, at which the process died. Pure.

    The wait is 0 after a single death, and 0.5 s after two deaths within a minute. Each further death doubles the wait, up to 30 s.
    """
    recent = sum(1 for moment in deaths if now - moment < CALM_S)
    return 0.0 if recent <= 1 else min(_MAX_DELAY_S, 0.25 * 2.0 ** (recent - 1))
