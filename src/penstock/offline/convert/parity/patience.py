"""Bounds the time of a comparison: calls that a slow model has no time for are left out, and listed in the certificate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.clock import Clock, SystemClock
from penstock.offline.convert.parity.cases import Case

_SECONDS = 60.0


class Patience:
    """The time for calls that are not essential. Essential calls are always made, and cost nothing of it."""

    def __init__(self, seconds: float = _SECONDS, clock: Clock | None = None) -> None:
        self._left_s, self._clock = seconds, clock or SystemClock()
        self._largest, self._largest_s = 1, 0.0
        self.left_out: list[str] = []
        """The labels of the calls that were not made."""

    def allows(self, case: Case) -> bool:
        """True if there is time for ``case``. Otherwise, the case counts as left out."""
        if self._left_s > 0 and self._predicted_s(case) <= self._left_s:
            return True
        self.left_out.append(case.label)
        return False

    @contextmanager
    def spending(self, case: Case, *, is_essential: bool = False) -> Iterator[None]:
        """Measure the time of the block, which makes the call ``case`` and compares the results."""
        start = self._clock.now()
        try:
            yield
        finally:
            seconds = self._clock.now() - start
            if not is_essential:
                self._left_s -= seconds
            if (elements := _elements(case)) >= self._largest:
                self._largest, self._largest_s = elements, seconds

    def _predicted_s(self, case: Case) -> float:
        """The time of the largest call so far, in proportion to the sizes."""
        return self._largest_s * _elements(case) / self._largest


def _elements(case: Case) -> int:
    return sum(array.size for array in case.inputs.values())
