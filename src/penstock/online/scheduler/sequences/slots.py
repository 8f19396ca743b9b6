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


class SequencePlace(msgspec.Struct, frozen=True):
    """A slot of an instance."""

    instance: int
    slot: int


class SequenceStep(msgspec.Struct, eq=False):
    """One request of a sequence from ``submit`` to its end; what the submitter holds."""

    give_up: Callable[[SequenceStep], None]
    sequence: Sequence
    request: InferRequest | None
    """None once it is its instance's, or has ended: it refers to this step."""
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
    place: SequencePlace = SequencePlace(0, 0)
    pending: Cancellable | None = None
    """What its instance's batcher made of it; None, and the place without meaning, until it may run and
    once it has ended."""
    timer: TimerHandle | None = None
    """For its deadline until then."""
    verdict: PenstockError | None = None
    """What is told of it instead of what became of it."""

    def cancel(self) -> None:
        """See ``scheduler.base.Cancellable``."""
        self.give_up(self)


class Sequence(msgspec.Struct, eq=False):
    """All that is known of one id."""

    id: SequenceId
    place: SequencePlace | None = None
    """None while it has no slot: then it is in the backlog."""
    is_open: bool = False
    """Whether it takes requests that are no start."""
    running: SequenceStep | None = None
    """The one that its instance has."""
    waiting: deque[SequenceStep] = msgspec.field(default_factory=deque)
    timer: TimerHandle | None = None
    """For how long it may be idle."""
    states: dict[str, Array] = msgspec.field(default_factory=dict)
    """Belongs to ``ImplicitStates``."""

    @property
    def is_idle(self) -> bool:
        return self.running is None and not self.waiting


class SequenceTable:
    """The sequences of a model with ``instances`` of ``slots`` each. Who calls it looks at ``ready`` and ``over`` afterwards."""

    def __init__(self, instances: int, slots: int) -> None:
        self.ready: deque[SequenceStep] = deque()
        """Requests that shall be given to the instance of their ``place``; each is told of with ``finish`` or ``give_up``."""
        self.over: deque[tuple[int, Sequence]] = deque()
        """Sequences that ended, with the instance that they were on."""
        self._instances, self._count = instances, instances * slots
        self._free: list[tuple[int, int]] = []  # a heap of those that were used before
        self._unused = 0  # the first that never was, counted through all instances
        self._sequences: dict[SequenceId, Sequence] = {}
        self._backlog: dict[SequenceId, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences.values()))

    def find(self, identity: SequenceId) -> Sequence:
        """The sequence of ``identity``; if there is none, a new one that counts once a request is added."""
        return self._sequences.get(identity) or Sequence(identity)

    def add(self, step: SequenceStep) -> None:
        """Take in the next request of its sequence, which accepts it. A start of what is under way starts it anew."""
        sequence = self._sequences.setdefault(step.sequence.id, step.sequence)
        step.last, sequence.is_open = step.end, not step.end
        sequence.waiting.append(step)
        self._advance(sequence)

    def finish(self, step: SequenceStep) -> None:
        """The instance is done with ``step``, or nothing more can keep it from running."""
        step.sequence.running = None
        (self.end if step.last else self._advance)(step.sequence)

    def give_up(self, step: SequenceStep) -> list[SequenceStep]:
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
        sequence.is_open = sequence.is_open and behind < len(steps)
        before = steps[first - 1] if first else sequence.running
        if before is None:
            self.end(sequence)
        else:
            before.last = True
        return steps[first:behind]

    def end(self, sequence: Sequence) -> None:
        """It is over, and no instance has a request of it. What waits under its id is another sequence: that keeps the slot if nobody
        else waits for one, and goes behind the others otherwise."""
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
        """Let its next request run if it can."""
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
        """The lowest free slot; of several instances the first's. So batches are small, and instances share the work."""
        if not self._free and self._unused < self._count:
            self._free.append(divmod(self._unused, self._instances))
            self._unused += 1
        return SequencePlace(*reversed(heapq.heappop(self._free))) if self._free else None
