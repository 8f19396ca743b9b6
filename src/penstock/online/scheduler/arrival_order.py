"""Delivers answers in the order of the requests. An answer waits until all earlier requests have been answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.errors import Cancelled
from penstock.online.scheduler.answers import tell
from penstock.request import Done, InferResponse, Outcome


class ArrivalOrder:
    """The order of the requests of one model version. Used only on the event loop."""

    def __init__(self) -> None:
        self._places: deque[_Place] = deque()
        self._is_advancing = False

    def place(self, done: Done) -> Done:
        """A callback to use in place of ``done`` for a new request. It delivers answers in order, and a cancellation immediately."""
        place = _Place(done, self._advance)
        self._places.append(place)
        return place

    def _advance(self) -> None:
        if self._is_advancing:
            return  # called from within the loop below, which also delivers these answers
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
    __slots__ = ("_advance", "_done", "answers", "ended")

    def __init__(self, done: Done, advance: Callable[[], None]) -> None:
        self._done = done
        self._advance = advance
        self.answers: list[Outcome] = []
        self.ended = False

    def __call__(self, outcome: Outcome) -> None:
        self.ended = not isinstance(outcome, InferResponse) or outcome.final
        self.answers.append(outcome)
        if isinstance(outcome, Cancelled):
            self.answers = [outcome]
            self.give()
        self._advance()

    def give(self) -> None:
        answers, self.answers = self.answers, []
        for outcome in answers:
            tell(self._done, outcome)
