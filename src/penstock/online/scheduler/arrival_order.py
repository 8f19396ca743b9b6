"""Answers held back until those of all earlier requests have been given."""

from __future__ import annotations

import logging
from collections import deque

from penstock.errors import Cancelled
from penstock.request import Done, InferResponse, Outcome

_log = logging.getLogger(__name__)


class ArrivalOrder:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._places: deque[_Place] = deque()
        self._is_advancing = False

    def place(self, done: Done) -> Done:
        """Stands for ``done`` of the request that has just arrived: passes answers on when it is their turn.

        A cancellation is passed on at once, out of order.
        """
        place = _Place(self, done)
        self._places.append(place)
        return place

    def advance(self) -> None:
        """Give the answers whose turn it is."""
        if self._is_advancing:
            return  # a receiver led to more answers; they are given after those that are being given
        self._is_advancing = True
        while self._places:
            first = self._places[0]
            first.give()
            if not first.answers:
                if not first.ended:
                    break
                self._places.popleft()
        self._is_advancing = False


class _Place:
    __slots__ = ("_done", "_order", "answers", "ended")

    def __init__(self, order: ArrivalOrder, done: Done) -> None:
        self._order = order
        self._done = done
        self.answers: list[Outcome] = []
        self.ended = False

    def __call__(self, outcome: Outcome) -> None:
        self.ended = not isinstance(outcome, InferResponse) or outcome.final
        self.answers.append(outcome)
        if isinstance(outcome, Cancelled):
            self.answers = [outcome]
            self.give()
        self._order.advance()

    def give(self) -> None:
        answers, self.answers = self.answers, []
        for outcome in answers:
            try:
                self._done(outcome)
            except Exception:  # noqa: BLE001 - a receiver's bug must not keep the others' answers from them
                _log.exception("a receiver failed")
