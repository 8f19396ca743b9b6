"""The waiting requests of one model version, in the order in which they will run.

Requests that can be merged with one another form a line. A line is ordered by priority level. Within a level, requests whose
timeout has passed come last. All other requests are ordered by arrival. Nothing here locks, waits or reads the time.
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
"""A time in nanoseconds that is never reached."""

_NO_KEY = object()
_SLACK = 64
"""Entries that the heap may keep in addition to two per waiting request."""


class Canceller(Protocol):
    """The scheduler that has accepted a request and can cancel it."""

    def cancel(self, pending: Pending) -> None: ...


class Pending(msgspec.Struct, eq=False):
    """One request, from ``submit`` to its end. The caller of ``submit`` holds this object. Times are ``time.monotonic_ns``."""

    owner: Canceller
    number: int
    """Sequence number in the order of arrival."""
    request: InferRequest
    rows: int
    key: Hashable
    """Only requests with equal keys can be merged."""
    done: Done | None
    """None once the request has ended."""
    arrived_ns: int
    lane: int = 0
    """The request's lane in its line: twice the level (counted from 0), plus one if the request's timeout has passed."""
    timeout_ns: int = NEVER
    """The time until which the request may stay in the queue."""
    deadline_ns: int = NEVER
    """Time after which the client no longer waits for the answer."""
    expires_ns: int = NEVER
    """The time at which the request expires: the earlier of the two times above."""

    def cancel(self) -> None:
        """Cancel the request, on the event loop. Unless the request has ended, this calls ``done`` with Cancelled.

        Idempotent.
        """
        if self.done is not None:
            self.owner.cancel(self)


Lane = dict[int, Pending]
"""Requests by number, in order. Iterating a dict skips each removed entry in about a nanosecond until the dict is next resized. An
OrderedDict would take three times as long for every request."""

Lanes = list[Lane]
"""The lanes of a line. A request leaves after all requests of the earlier lanes."""


class _Line(Collection[Pending]):
    """A line as one collection: its lanes, one after the other."""

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
    """The counters of one priority level."""

    __slots__ = ("came", "left", "policy", "rows")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.rows = 0
        """Number of waiting rows."""
        # There are two counters, because the event loop counts arrivals and the instances count departures.
        self.came = self.left = 0

    @property
    def waiting(self) -> int:
        """Number of waiting requests. Valid only if ``came`` is updated when requests arrive."""
        return self.came - self.left


class Queue:
    """The queue that the module's docstring describes. ``levels[n]`` is priority level n + 1."""

    def __init__(self, policies: Sequence[QueuePolicy]) -> None:
        self.levels = [PriorityLevel(policy) for policy in policies]
        self.next_ns = NEVER
        """No request expires before this time, so ``expire`` need not be called earlier."""
        delays = any(policy.timeout_action is TimeoutAction.DELAY for policy in policies)
        self._lane_count = 2 * len(policies) if delays or len(policies) > 1 else 1
        self._lines: dict[Hashable, Lanes] = {}
        self._moments: list[tuple[int, int, Pending]] = []
        """A heap of expiry times. Entries of requests that have left the queue are removed later."""

    def __len__(self) -> int:
        return sum(len(lane) for lanes in self._lines.values() for lane in lanes)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def lines(self) -> list[Collection[Pending]]:
        """The non-empty lines, starting with the most urgent. The requests of a line are in the order in which they will run."""
        lines: list[Collection[Pending]]
        if self._lane_count == 1:
            lines = [lanes[0].values() for lanes in self._lines.values()]
        else:
            lines = [_Line(lanes) for lanes in self._lines.values()]
        if len(lines) > 1:
            lines.sort(key=_urgency)
        return lines

    def extend(self, arrived: Sequence[Pending]) -> None:
        """Add ``arrived`` in order, except requests that have ended."""
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
                lanes = self._lines.get(key) or self._lines.setdefault(key, [{} for _ in range(self._lane_count)])
            lanes[lane][pending.number] = pending
            if pending.expires_ns < NEVER:
                self._watch(pending)
        if len(self._moments) > _SLACK:
            self._forget()

    def remove(self, pending: Pending) -> bool:
        """Remove ``pending``. Returns False if the request was not waiting."""
        lanes = self._lines.get(pending.key)
        if lanes is None or lanes[pending.lane].pop(pending.number, None) is None:
            return False
        if not any(lanes):
            del self._lines[pending.key]
        self._leave(pending)
        return True

    def take(self, batch: Sequence[Pending], rows: int) -> None:
        """Remove the requests of a batch of ``rows`` rows, all from one line."""
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
        """Remove and return the expired requests. In levels with DELAY, a timeout only moves requests to the end of the level."""
        expired = []
        while self._moments and self._moments[0][0] <= now_ns:
            _, _, pending = heapq.heappop(self._moments)
            if not self._holds(pending):
                continue
            policy = self.levels[pending.lane >> 1].policy
            if pending.deadline_ns <= now_ns or policy.timeout_action is TimeoutAction.REJECT:
                self.remove(pending)
                expired.append(pending)
                continue
            lanes = self._lines[pending.key]
            del lanes[pending.lane][pending.number]
            pending.lane += 1
            pending.expires_ns = pending.deadline_ns
            lanes[pending.lane][pending.number] = pending
            if pending.expires_ns < NEVER:
                self._watch(pending)
        self._forget()
        return expired

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
        """Limit the heap to a size proportional to the number of waiting requests."""
        if len(self._moments) > 2 * len(self) + _SLACK:
            self._moments = [moment for moment in self._moments if self._holds(moment[2])]
            heapq.heapify(self._moments)
        self.next_ns = self._moments[0][0] if self._moments else NEVER
