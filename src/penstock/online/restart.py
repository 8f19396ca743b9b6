"""When something that died is started again."""

from __future__ import annotations

from collections.abc import Sequence

CALM_S = 60.0
"""How long a death counts."""
_MAX_DELAY_S = 30.0


def restart_delay_s(deaths: Sequence[float], now: float) -> float:
    """How long to wait after the last death; ``deaths`` are the moments in seconds at which it died. Pure.

    Not at all after a lone death; after several within a minute 0.5 s, doubled with each, up to half a minute.
    """
    recent = sum(1 for moment in deaths if now - moment < CALM_S)
    return 0.0 if recent <= 1 else min(_MAX_DELAY_S, 0.25 * 2.0 ** (recent - 1))
