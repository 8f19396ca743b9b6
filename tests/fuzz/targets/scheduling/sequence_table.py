"""Fuzzes the assignment of sequences to slots: any order of requests, ends, failures and cancellations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from penstock.online.scheduler.sequences.slots import SequenceStep, SequenceTable
from tests.fuzz.mutator import Seed
from tests.fuzz.target import Script, Target

_IDS = 5
_MOST = 40


class _Model:
    """The table, and the steps in it."""

    def __init__(self, script: Script) -> None:
        self._instances, self._slots = 1 + script.number(3), 1 + script.number(3)
        self.table = SequenceTable(self._instances, self._slots)
        self.running: list[SequenceStep] = []
        self.open: list[SequenceStep] = []
        """Steps that have not ended."""

    def step(self, script: Script) -> None:
        match script.number(6):
            case 0 | 1 | 2:
                self._add(1 + script.number(_IDS), starts=not script.number(3), ends=not script.number(3))
            case 3 | 4 if self.running:
                self._finish(self.running[script.number(len(self.running))])
            case 5 if self.open:
                self._give_up(self.open[script.number(len(self.open))])
        self.settle()

    def _add(self, identity: int, starts: bool, ends: bool) -> None:
        sequence = self.table.find(identity)
        starts = starts or not sequence.is_open
        step = SequenceStep(cast(Any, None), sequence, None, 0, None, 0, starts, ends)
        self.open.append(step)
        self.table.add(step)

    def _finish(self, step: SequenceStep) -> None:
        self.running.remove(step)
        self.open.remove(step)
        self.table.finish(step)

    def _give_up(self, step: SequenceStep) -> None:
        dropped = self.table.give_up(step)
        assert dropped[0] is step
        for one in dropped:
            self.open.remove(one)
            if one in self.running:
                self.running.remove(one)

    def settle(self) -> None:
        while self.table.ready:
            self.running.append(self.table.ready.popleft())
        while self.table.over:
            instance, _ = self.table.over.popleft()
            assert 0 <= instance < self._instances
        places = [step.place for step in self.running]
        assert len(set(places)) == len(places), "two requests run in one slot"
        assert all(place.instance < self._instances and place.slot < self._slots for place in places)
        held = [sequence.place for sequence in self.table if sequence.place is not None]
        assert len(set(held)) == len(held) <= self._instances * self._slots, "two sequences have one slot"
        backlog = [sequence for sequence in self.table if sequence.place is None]
        assert not backlog or len(held) == self._instances * self._slots, "a sequence waits beside a free slot"
        for sequence in self.table:
            assert sequence.place is None or sequence.running is not None or not sequence.waiting, "a request is stuck"
        assert len(self.open) == sum(len(one.waiting) + (one.running is not None) for one in self.table)

    def end(self) -> None:
        """Every request runs, and a sequence that stays open can be ended."""
        while self.open:
            if self.running:
                self._finish(self.running[0])
            else:  # the others wait for a slot of a sequence that is idle
                self.table.end(next(one for one in self.table if one.is_idle))
            self.settle()
        assert not self.open
        for sequence in list(self.table):
            self.table.end(sequence)
            self.settle()
        assert not len(self.table), "a sequence is left"


class SequenceTableTarget(Target):
    """See ``Target``."""

    def __init__(self) -> None:
        self.seeds: Sequence[Seed] = [
            tuple(bytes((n * step % 253,)) for n in range(start, start + 60))
            for start in range(5)
            for step in (1, 7, 13)
        ]

    def run(self, data: bytes) -> None:
        script = Script(data[:2000])
        model = _Model(script)
        while not script.is_over and len(model.open) < _MOST:
            model.step(script)
        model.end()
