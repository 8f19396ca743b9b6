"""The requests of one model version that wait, in the order in which they shall leave.

Requests that can be merged with one another form a line. In a line, the more urgent priority levels stand first, within a level those
that are not late, and within these the order is that of arrival. Nothing here locks, waits or knows the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import msgspec

from penstock.online.scheduler.batching_config import QueuePolicy, TimeoutAction
from penstock.request import Done, InferRequest

NEVER = 1 << 63
"""A moment, in nanoseconds, that does not come."""

_NO_KEY = object()
_SLACK = 64
"""How many moments of requests that have left may be kept beside twice those of requests that wait."""


class Canceller(Protocol):
    """Who has accepted a request and can still give it up."""

    def cancel(self, pending: Pending) -> None: ...


class Pending(msgspec.Struct, eq=False):
    """One request from ``submit`` to its end; what the submitter holds. Times are ``time.monotonic_ns``."""

    owner: Canceller
    number: int
    """Counts up in the order of arrival."""
    request: InferRequest
    rows: int
    key: Hashable
    """Only requests with equal keys can be merged."""
    done: Done | None
    """None once the request has ended."""
    arrived_ns: int
    lane: int = 0
    """Place in its line: twice the level from 0, and one more once it is late."""
    timeout_ns: int = NEVER
    """When it will have waited as long as its level allows."""
    deadline_ns: int = NEVER
    """When an answer stops being of use."""
    expires_ns: int = NEVER
    """The earlier of both: when something happens to it if it still waits."""

    def cancel(self) -> None:
        """Give the request up, on the event loop: what is queued is dropped, an answer on its way is. ``done`` is called with
        Cancelled before this returns, unless it had its last answer before. Idempotent."""
        if self.done is not None:
            self.owner.cancel(self)


Lane = dict[int, Pending]
"""By number, in order. A plain dict: what left in front of it is passed over when it is read, a nanosecond or less for each, until
it next grows; an OrderedDict would take three times as long for every request."""

Lanes = list[Lane]
"""The requests that can be merged with one another; a request leaves after those of the lanes before its own."""


class _Line(Collection[Pending]):
    """Several lanes, one behind the other."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def __iter__(self) -> Iterator[Pending]:
        return chain.from_iterable(lane.values() for lane in self._lanes)

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def __contains__(self, pending: object) -> bool:
        return isinstance(pending, Pending) and any(pending.number in lane for lane in self._lanes)


def _urgency(line: Collection[Pending]) -> tuple[int, int]:
    first = next(iter(line))
    return first.lane, first.number


class PriorityLevel:
    """What waits at one priority level."""

    __slots__ = ("came", "left", "policy", "rows")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.rows = 0
        """Rows in the queue."""
        # Two counters, since arrivals are counted by the event loop, and departures by the instance that takes a batch.
        self.came = self.left = 0

    @property
    def waiting(self) -> int:
        """Requests accepted that have not left, if their arrivals are counted in ``came``."""
        return self.came - self.left


class Queue:
    """See the module. ``levels[n]`` is priority level n + 1."""

    def __init__(self, policies: Sequence[QueuePolicy]) -> None:
        self.levels = [PriorityLevel(policy) for policy in policies]
        self.next_ns = NEVER
        """When ``expire`` has something to do, or earlier."""
        delays = any(policy.timeout_action is TimeoutAction.DELAY for policy in policies)
        self._lane_count = 2 * len(policies) if delays or len(policies) > 1 else 1
        self._lines: dict[Hashable, Lanes] = {}
        self._moments: list[
            tuple[int, int, Pending]
        ] = []  # a heap; those of requests that have left are taken out late

    def __len__(self) -> int:
        return sum(len(lane) for lanes in self._lines.values() for lane in lanes)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def lines(self) -> list[Collection[Pending]]:
        """What can be merged, each in the order of leaving; none is empty, and the one that may leave first is in front."""
        lines: list[Collection[Pending]]
        if not self._lines:
            lines = []
        elif self._lane_count == 1:
            lines = [lanes[0].values() for lanes in self._lines.values()]
        else:
            lines = [_Line(lanes) for lanes in self._lines.values()]
        if len(lines) > 1:
            lines.sort(key=_urgency)
        return lines

    def extend(self, arrived: Sequence[Pending]) -> None:
        """Let ``arrived`` join, in order; those that have ended already do not."""
        levels = self.levels
        key: Hashable = _NO_KEY
        lanes: Lanes = []
        for pending in arrived:
            lane = pending.lane
            level = levels[lane >> 1]
            if pending.done is None:
                level.left += 1
                continue
            level.rows += pending.rows
            if pending.key is not key:
                key = pending.key
                lanes = self._lines.get(key) or self._lines.setdefault(key, self._open())
            lanes[lane][pending.number] = pending
            if pending.expires_ns < NEVER:
                self._watch(pending)
        if len(self._moments) > _SLACK:
            self._forget()

    def remove(self, pending: Pending) -> bool:
        """Take one out; whether it was there."""
        lanes = self._lines.get(pending.key)
        if lanes is None or lanes[pending.lane].pop(pending.number, None) is None:
            return False
        if not any(lanes):
            del self._lines[pending.key]
        self._leave(pending)
        return True

    def take(self, batch: Sequence[Pending], rows: int) -> None:
        """Take out a batch of ``rows`` rows, all of one line."""
        key = batch[0].key
        lanes = self._lines[key]
        if len(lanes) == 1 and len(batch) == len(lanes[0]):
            del self._lines[key]
        else:
            for pending in batch:
                del lanes[pending.lane][pending.number]
            if not any(lanes):
                del self._lines[key]
        if len(self.levels) == 1:
            self.levels[0].left += len(batch)
            self.levels[0].rows -= rows
        else:
            for pending in batch:
                self._leave(pending)

    def expire(self, now_ns: int) -> list[Pending]:
        """Take out those whose deadline or time-out has come; of levels with DELAY, the late go behind instead."""
        expired = []
        while self._moments and self._moments[0][0] <= now_ns:
            _, _, pending = heapq.heappop(self._moments)
            if not self._holds(pending):
                continue
            policy = self.levels[pending.lane >> 1].policy
            if pending.deadline_ns <= now_ns or policy.timeout_action is TimeoutAction.REJECT:
                self.remove(pending)
                expired.append(pending)
            else:
                self._delay(pending)
        self._forget()
        return expired

    def _open(self) -> Lanes:
        return [{} for _ in range(self._lane_count)]

    def _delay(self, pending: Pending) -> None:
        lanes = self._lines[pending.key]
        del lanes[pending.lane][pending.number]
        pending.lane += 1
        pending.expires_ns = pending.deadline_ns
        lanes[pending.lane][pending.number] = pending
        if pending.expires_ns < NEVER:
            self._watch(pending)

    def _holds(self, pending: Pending) -> bool:
        lanes = self._lines.get(pending.key)
        return lanes is not None and pending.number in lanes[pending.lane]

    def _leave(self, pending: Pending) -> None:
        level = self.levels[pending.lane >> 1]
        level.left += 1
        level.rows -= pending.rows

    def _watch(self, pending: Pending) -> None:
        heapq.heappush(self._moments, (pending.expires_ns, pending.number, pending))
        self.next_ns = self._moments[0][0]

    def _forget(self) -> None:
        """Keep the heap in proportion to what waits."""
        if len(self._moments) > 2 * len(self) + _SLACK:
            self._moments = [moment for moment in self._moments if self._holds(moment[2])]
            heapq.heapify(self._moments)
        self.next_ns = self._moments[0][0] if self._moments else NEVER
