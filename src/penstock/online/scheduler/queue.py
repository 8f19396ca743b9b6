"""The requests of one model version that wait, in the order in which they shall leave.

Requests that can be merged with one another form a line. In a line, the more urgent priority levels stand first, within a level those
that are not late, and within these the order is that of arrival. Nothing here locks, waits or knows the time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import msgspec

from penstock.online.scheduler.batching_config import QueuePolicy, TimeoutAction
from penstock.request import Done, InferRequest

NEVER = 1 << 63
"""A moment, in nanoseconds, that does not come."""

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
    timeout_ns: int = 0
    """When it will have waited as long as its level allows; 0: never."""
    deadline_ns: int = 0
    """When an answer stops being of use; 0: never."""

    def cancel(self) -> None:
        """Give the request up, on the event loop: what is queued is dropped, an answer on its way is. ``done`` is called with
        Cancelled before this returns, unless it had its last answer before. Idempotent."""
        if self.done is not None:
            self.owner.cancel(self)

    @property
    def expires_ns(self) -> int:
        """When something happens to it if it still waits then; ``NEVER`` is never."""
        late = self.lane & 1
        return min((0 if late else self.timeout_ns) or NEVER, self.deadline_ns or NEVER)


Lane = OrderedDict[int, Pending]


class Line:
    """Requests that can be merged. Iterates in the order in which they leave."""

    __slots__ = ("lanes",)

    def __init__(self, count: int) -> None:
        self.lanes: list[Lane] = [OrderedDict() for _ in range(count)]

    def __iter__(self) -> Iterator[Pending]:
        if len(self.lanes) == 1:
            return iter(self.lanes[0].values())
        return chain.from_iterable(lane.values() for lane in self.lanes)

    def __len__(self) -> int:
        return len(self.lanes[0]) if len(self.lanes) == 1 else sum(map(len, self.lanes))


def _urgency(line: Line) -> tuple[int, int]:
    first = next(iter(line))
    return first.lane, first.number


class Level:
    """What waits at one priority level. Two counters each way: the event loop counts arrivals, whoever has the lock departures."""

    __slots__ = ("came", "left", "policy", "rows_came", "rows_left")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.came = self.left = self.rows_came = self.rows_left = 0

    @property
    def waiting(self) -> int:
        return self.came - self.left

    @property
    def rows(self) -> int:
        return self.rows_came - self.rows_left


class Queue:
    """See the module. ``levels[n]`` is priority level n + 1."""

    def __init__(self, policies: Sequence[QueuePolicy]) -> None:
        self.levels = [Level(policy) for policy in policies]
        delays = any(policy.timeout_action is TimeoutAction.DELAY for policy in policies)
        self._lanes = 2 * len(policies) if delays or len(policies) > 1 else 1
        self._lines: dict[Hashable, Line] = {}
        self._moments: list[
            tuple[int, int, Pending]
        ] = []  # a heap; those of requests that have left are taken out late

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def next_ns(self) -> int:
        """When ``expire`` has something to do, or earlier; ``NEVER`` is never."""
        return self._moments[0][0] if self._moments else NEVER

    def lines(self) -> list[Line]:
        """Those that are not empty, the one that may leave first in front."""
        lines = list(self._lines.values())
        return lines if len(lines) < 2 else sorted(lines, key=_urgency)

    def extend(self, arrived: list[Pending]) -> None:
        """Let ``arrived`` join, in order; those that have ended already do not."""
        lines = self._lines
        for pending in arrived:
            if pending.done is None:
                self._leave(pending)
                continue
            line = lines.get(pending.key)
            if line is None:
                line = lines[pending.key] = Line(self._lanes)
            line.lanes[pending.lane][pending.number] = pending
            if pending.timeout_ns or pending.deadline_ns:
                heapq.heappush(self._moments, (pending.expires_ns, pending.number, pending))
        if len(self._moments) > _SLACK:
            self._forget()

    def remove(self, pending: Pending) -> bool:
        """Take one out; whether it was there."""
        line = self._lines.get(pending.key)
        if line is None or line.lanes[pending.lane].pop(pending.number, None) is None:
            return False
        if not line:
            del self._lines[pending.key]
        self._leave(pending)
        return True

    def take(self, batch: Sequence[Pending], rows: int) -> None:
        """Take out a batch of ``rows`` rows, all of one line."""
        key = batch[0].key
        line = self._lines[key]
        if len(batch) == len(line):
            del self._lines[key]
        else:
            for pending in batch:
                del line.lanes[pending.lane][pending.number]
        if len(self.levels) > 1:
            for pending in batch:
                self._leave(pending)
        else:
            self.levels[0].left += len(batch)
            self.levels[0].rows_left += rows

    def expire(self, now_ns: int) -> list[Pending]:
        """Take out those whose deadline or time-out has come; of levels with DELAY, the late go behind instead."""
        expired = []
        while self._moments and self._moments[0][0] <= now_ns:
            _, _, pending = heapq.heappop(self._moments)
            if not self._holds(pending):
                continue
            late = pending.deadline_ns and pending.deadline_ns <= now_ns
            policy = self.levels[pending.lane >> 1].policy
            if late or policy.timeout_action is TimeoutAction.REJECT:
                self.remove(pending)
                expired.append(pending)
            else:
                self._delay(pending)
        self._forget()
        return expired

    def _delay(self, pending: Pending) -> None:
        lanes = self._lines[pending.key].lanes
        del lanes[pending.lane][pending.number]
        pending.lane += 1
        lanes[pending.lane][pending.number] = pending
        if pending.deadline_ns:
            heapq.heappush(self._moments, (pending.deadline_ns, pending.number, pending))

    def _holds(self, pending: Pending) -> bool:
        line = self._lines.get(pending.key)
        return line is not None and pending.number in line.lanes[pending.lane]

    def _leave(self, pending: Pending) -> None:
        level = self.levels[pending.lane >> 1]
        level.left += 1
        level.rows_left += pending.rows

    def _forget(self) -> None:
        """Keep the heap in proportion to what waits."""
        if len(self._moments) > 2 * len(self) + _SLACK:
            self._moments = [moment for moment in self._moments if self._holds(moment[2])]
            heapq.heapify(self._moments)
