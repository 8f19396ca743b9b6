"""Assigns sequences to slots, and chooses the next request of each sequence. Nothing here locks, waits or reads the time.

A sequence has one slot of one instance from its first request to its last request. It has at most one request at this instance at
a time. Sequences that start while all slots are taken wait in a backlog, in order. All requests with the same sequence id form one
queue. If a sequence with the same id starts again, it therefore runs after the previous sequence.
"""

from __future__ import annotations

import heapq
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable, Hashable, Iterator

import msgspec

from penstock.errors import PenstockError
from penstock.online.scheduler.base import Cancellable
from penstock.request import Done, InferRequest
from penstock.tensor import Array

SequenceId = int | str


class SequencePlace(msgspec.Struct, frozen=True):
    """A slot: the instance, and the number of the row."""

    instance: int
    slot: int


class SequenceStep(msgspec.Struct, eq=False):
    """One request of a sequence, from ``submit`` to its end. The caller of ``submit`` holds this object."""

    give_up: Callable[[SequenceStep], None]
    sequence: Sequence
    request: InferRequest | None
    """None once the request has reached its instance or has ended. This breaks the reference cycle with the step."""
    key: Hashable
    done: Done | None
    """None once the request has ended."""
    arrived_ns: int
    start: bool
    end: bool
    last: bool = False
    """True if the sequence ends after this request, because of its END flag or because the requests behind it were cancelled."""
    began: bool = False
    """True once an instance has taken the request. Set on the instance's thread."""
    place: SequencePlace = SequencePlace(0, 0)
    pending: Cancellable | None = None
    """The request in its instance's batcher. None while the request is not in a batcher; ``place`` is then invalid."""
    timer: TimerHandle | None = None
    """Timer that ends the request at its deadline, unless the request has reached its instance."""
    verdict: PenstockError | None = None
    """If set, the request is answered with this error instead of its outcome."""

    def cancel(self) -> None:
        """Cancel the request. See ``Cancellable``."""
        self.give_up(self)


class Sequence(msgspec.Struct, eq=False):
    """The state of one sequence id."""

    id: SequenceId
    place: SequencePlace | None = None
    """None while the sequence is in the backlog."""
    is_open: bool = False
    """True once the sequence has started, so that it accepts requests without the START flag."""
    running: SequenceStep | None = None
    """The request that has been passed to the instance."""
    waiting: deque[SequenceStep] = msgspec.field(default_factory=deque)
    timer: TimerHandle | None = None
    """The timer that ends the sequence when it has been idle too long."""
    states: dict[str, Array] = msgspec.field(default_factory=dict)
    """Used by ``ImplicitStates`` only."""

    @property
    def is_idle(self) -> bool:
        return self.running is None and not self.waiting


class SequenceTable:
    """The sequences of a model with ``slots`` slots per instance. After each call, the caller processes ``ready`` and ``over``."""

    def __init__(self, instances: int, slots: int) -> None:
        self.ready: deque[SequenceStep] = deque()
        """Requests to submit to the instance of their ``place``. The caller reports their ends with ``finish`` or ``give_up``."""
        self.over: deque[tuple[int, Sequence]] = deque()
        """Sequences that have ended, each with its instance."""
        self._instances, self._count = instances, instances * slots
        self._free: list[tuple[int, int]] = []  # a heap of slots that were used before
        self._unused = 0  # the first slot that was never used, numbered across all instances
        self._sequences: dict[SequenceId, Sequence] = {}
        self._backlog: dict[SequenceId, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences.values()))

    def find(self, identity: SequenceId) -> Sequence:
        """The sequence with the id ``identity``, or a new sequence. A new sequence enters the table with its first request."""
        return self._sequences.get(identity) or Sequence(identity)

    def add(self, step: SequenceStep) -> None:
        """Queue an accepted request. The START flag restarts an active sequence."""
        sequence = self._sequences.setdefault(step.sequence.id, step.sequence)
        step.last, sequence.is_open = step.end, not step.end
        sequence.waiting.append(step)
        self._advance(sequence)

    def finish(self, step: SequenceStep) -> None:
        """Report that the instance has run ``step``, or will certainly run it."""
        step.sequence.running = None
        (self.end if step.last else self._advance)(step.sequence)

    def give_up(self, step: SequenceStep) -> list[SequenceStep]:
        """Remove ``step``, which will not run, and the following steps of its sequence up to the next START. Returns the removed
        steps, beginning with ``step``.

        The steps before ``step`` still run, and then the sequence ends.
        """
        sequence = step.sequence
        if sequence.running is step:
            sequence.running = None
            sequence.waiting.appendleft(step)
        steps = list(sequence.waiting)
        first = steps.index(step)
        behind = next((number for number in range(first + 1, len(steps)) if steps[number].start), len(steps))
        sequence.waiting = deque(steps[:first] + steps[behind:])
        sequence.is_open = sequence.is_open and behind < len(steps)
        before = steps[first - 1] if first else sequence.running
        if before is None:
            self.end(sequence)
        else:
            before.last = True
        return steps[first:behind]

    def end(self, sequence: Sequence) -> None:
        """End ``sequence``, which has no request at an instance.

        Waiting requests with the same id form a new sequence. The new sequence keeps the slot if the backlog is empty, and
        otherwise joins the backlog.
        """
        place = sequence.place
        if place is not None:
            self.over.append((place.instance, sequence))
        if sequence.waiting and (place is None or not self._backlog):
            self._advance(sequence)
            return
        sequence.place = None
        self._backlog.pop(sequence.id, None)
        if sequence.waiting:
            self._backlog[sequence.id] = sequence
        else:
            del self._sequences[sequence.id]
        if place is not None:
            heapq.heappush(self._free, (place.slot, place.instance))
        while self._backlog and (found := self._take()) is not None:
            following = self._backlog.pop(next(iter(self._backlog)))
            following.place = found
            self._advance(following)

    def _advance(self, sequence: Sequence) -> None:
        """Run the next request of ``sequence`` if possible."""
        if sequence.running is not None or not sequence.waiting:
            return
        if sequence.place is None and sequence.id not in self._backlog:
            sequence.place = self._take()
        if sequence.place is None:
            self._backlog.setdefault(sequence.id, sequence)
            return
        sequence.running = sequence.waiting.popleft()
        sequence.running.place = sequence.place
        self.ready.append(sequence.running)

    def _take(self) -> SequencePlace | None:
        """Take the lowest free slot number, on the first instance where it is free. This keeps batches small and balances the load."""
        if not self._free and self._unused < self._count:
            self._free.append(divmod(self._unused, self._instances))
            self._unused += 1
        return SequencePlace(*reversed(heapq.heappop(self._free))) if self._free else None
