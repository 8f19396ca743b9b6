"""Which sequence has which slot of which instance, and which of its requests may run. Nothing here locks, waits or knows the time.

A sequence has one slot of one instance from its first request to its last, and one request with that instance at a time. Those that
start while all slots are taken stand in a backlog, in order. All requests of one id stand in one line, also when a sequence ends and
another starts under the same id: then the second runs after the first.
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


class Place(msgspec.Struct, frozen=True):
    """A slot (from 0) of an instance (from 0)."""

    instance: int
    slot: int


class Step(msgspec.Struct, eq=False):
    """One request of a sequence from ``submit`` to its end; what the submitter holds."""

    give_up: Callable[[Step], None]
    """What ``cancel`` calls."""
    sequence: Sequence
    request: InferRequest
    key: Hashable
    done: Done | None
    """None once the request has ended."""
    arrived_ns: int
    start: bool
    end: bool
    last: bool = False
    """Whether the sequence is over after it: it is the end, or what came behind it was given up."""
    began: bool = False
    """Whether an instance has taken it; set on the instance's thread."""
    place: Place = Place(0, 0)
    """Where it runs, once it may."""
    opened: bool = False
    """Whether its sequence was under way before it came."""
    pending: Cancellable | None = None
    """What its instance's batcher made of it; None until it may run."""
    timer: TimerHandle | None = None
    """For its deadline, while it may not run."""
    verdict: PenstockError | None = None
    """What is told of it instead of what became of it."""

    def cancel(self) -> None:
        """See ``Cancellable``."""
        self.give_up(self)


class Sequence(msgspec.Struct, eq=False):
    """All that is known of one id."""

    id: SequenceId
    place: Place | None = None
    """None while it has no slot: then it is in the backlog."""
    is_open: bool = False
    """Whether it takes requests that are no start."""
    running: Step | None = None
    """The one that its instance has."""
    waiting: deque[Step] = msgspec.field(default_factory=deque)
    """Those behind, in order."""
    timer: TimerHandle | None = None
    """For how long it may be idle."""
    states: dict[str, Array] = msgspec.field(default_factory=dict)
    """Belongs to ``ImplicitStates``, and so does the next."""
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def is_idle(self) -> bool:
        """Whether all its requests have ended."""
        return self.running is None and not self.waiting


class SequenceTable:
    """The sequences of a model with ``instances`` of ``slots`` each. Who calls it looks at ``ready`` and ``over`` afterwards."""

    def __init__(self, instances: int, slots: int) -> None:
        self.ready: deque[Step] = deque()
        """Requests that shall be given to the instance of their ``place``; each is told of with ``finish`` or ``give_up``."""
        self.over: deque[tuple[int, Sequence]] = deque()
        """Sequences that ended, with the instance that they were on."""
        self._instances, self._count = instances, instances * slots
        self._free: list[tuple[int, int]] = []  # a heap of slots that were used before
        self._unused = 0  # the first of those that never were, counted through all instances
        self._sequences: dict[SequenceId, Sequence] = {}
        self._backlog: dict[SequenceId, Sequence] = {}

    def __len__(self) -> int:
        """Sequences, those in the backlog too."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences.values()))

    def find(self, identity: SequenceId) -> Sequence:
        """The sequence of ``identity``; if there is none, a new one that counts once a request is added."""
        return self._sequences.get(identity) or Sequence(identity)

    def add(self, step: Step) -> None:
        """Take in the next request of its sequence, which accepts it. A start of what is under way starts it anew."""
        sequence = self._sequences.setdefault(step.sequence.id, step.sequence)
        step.opened, step.last = sequence.is_open, step.end
        sequence.is_open = not step.end
        sequence.waiting.append(step)
        self._advance(sequence)

    def withdraw(self, step: Step) -> None:
        """Undo ``add`` of the latest request, which became ready at once."""
        step.sequence.running, step.sequence.is_open = None, step.opened
        if not step.opened:
            self.end(step.sequence)

    def finish(self, step: Step) -> None:
        """The instance is done with ``step``, or nothing more can keep it from running."""
        step.sequence.running = None
        if step.last:
            self.end(step.sequence)
        else:
            self._advance(step.sequence)

    def give_up(self, step: Step) -> list[Step]:
        """``step`` will not run, and so neither will those behind it up to the next start; all are returned, ``step`` first. What
        came before runs, and then the sequence is over."""
        sequence = step.sequence
        if sequence.running is step:
            sequence.running = None
            sequence.waiting.appendleft(step)
        steps = list(sequence.waiting)
        first = steps.index(step)
        behind = next((number for number in range(first + 1, len(steps)) if steps[number].start), len(steps))
        sequence.waiting = deque(steps[:first] + steps[behind:])
        if behind == len(steps):
            sequence.is_open = False
        before = steps[first - 1] if first else sequence.running
        if before is not None:
            before.last = True
        else:
            self.end(sequence)
        return steps[first:behind]

    def end(self, sequence: Sequence) -> None:
        """The sequence, none of whose requests an instance has, is over. What waits under its id is another's: it keeps the slot if
        nobody waits for one, and stands behind the others otherwise."""
        place = sequence.place
        if place is not None:
            self.over.append((place.instance, sequence))
        if sequence.waiting and (place is None or not self._backlog):
            self._advance(sequence)
            return
        sequence.place = None
        if sequence.waiting:
            self._backlog[sequence.id] = sequence
        else:
            del self._sequences[sequence.id]
            self._backlog.pop(sequence.id, None)
        if place is not None:
            heapq.heappush(self._free, (place.slot, place.instance))
        while self._backlog and (found := self._take()) is not None:
            following = self._backlog.pop(next(iter(self._backlog)))
            following.place = found
            self._advance(following)

    def _advance(self, sequence: Sequence) -> None:
        """Let its next request run if it can."""
        if sequence.running is not None or not sequence.waiting:
            return
        if sequence.place is None and sequence.id not in self._backlog:
            sequence.place = self._take()
        if sequence.place is None:
            self._backlog.setdefault(sequence.id, sequence)
            return
        step = sequence.running = sequence.waiting.popleft()
        step.place = sequence.place
        self.ready.append(step)

    def _take(self) -> Place | None:
        """The lowest free slot; of several instances the first's. So batches are small, and instances share the work."""
        if self._free:
            slot, instance = heapq.heappop(self._free)
        elif self._unused < self._count:
            slot, instance = divmod(self._unused, self._instances)
            self._unused += 1
        else:
            return None
        return Place(instance, slot)
