"""Shares workers fairly among flows, such as the clients of a server: a flow that has received less work goes first.

This is fair queueing in virtual time (Demers et al., SIGCOMM 1989; Goyal et al., SIGCOMM 1996), except that work is charged once it
is done, because its cost is not known before. A new flow starts at the time that all flows would have reached if they had been served
equally, so that it neither waits for the work of others nor overtakes them for long.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

_S_PER_BYTE = 2e-8
"""Seconds of work that a byte of an item's inputs is expected to need before any item has ended: about those of a JPEG."""
_WEIGHT = 1 / 8
"""Weight of one item in what is expected of the next."""
_KEPT_S = 2.0
"""An item that has been started keeps its place for this many seconds of work. Otherwise, the items of many flows would all be
half done before any ends."""


class Flow:
    """The items of one client."""

    __slots__ = ("active", "newest", "owner", "received")

    def __init__(self, owner: Flows, received: float = 0.0) -> None:
        self.owner = owner
        self.received = received
        """Virtual time: the seconds of work that the flow has received, counted from a common start."""
        self.active = 0
        """Number of items in progress or waiting."""
        self.newest = -1
        """Number of the newest item that has been started."""


class Flows:
    """The flows of one line, by key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flows: dict[Hashable, Flow] = {}
        self._active = 0
        self._now = 0.0
        """The virtual time of a flow that has always received an equal share."""
        self._s_per_byte = _S_PER_BYTE
        self._slowest_s = 0.0

    def __len__(self) -> int:
        return len(self._flows)

    def enter(self, key: Hashable) -> Flow:
        """The flow ``key``, with one more item. Call ``leave`` when the item has ended."""
        with self._lock:
            flow = self._flows.get(key)
            if flow is None:
                if len(self._flows) > 2 * self._active:
                    self._forget()
                flow = self._flows[key] = Flow(self, self._now)
            if not flow.active:
                self._active += 1
                flow.received = max(flow.received, self._now)
            flow.active += 1
            return flow

    def leave(self, item: Item) -> None:
        """End ``item``."""
        with self._lock:
            item.flow.active -= 1
            self._active -= not item.flow.active
            if item.size and item.cost_s:
                self._s_per_byte += (item.cost_s / item.size - self._s_per_byte) * _WEIGHT
                self._slowest_s = max(item.cost_s, self._slowest_s * (1 - _WEIGHT))

    def charge(self, items: Sequence[Item], seconds: float) -> None:
        """Count ``seconds`` of work for each of ``items``."""
        if not self._active:
            return  # all items are of one flow
        with self._lock:
            for item in items:
                item.cost_s += seconds
                item.flow.received += seconds
                self._now += seconds / max(1, self._active)

    def expected_s(self, size: int) -> float:
        """The expected cost of an item of ``size`` bytes, at most that of the slowest recent item."""
        return min(size * self._s_per_byte, self._slowest_s)

    def _forget(self) -> None:
        """Remove idle flows that would not go first if they came back."""
        is_idle = not self._active
        self._flows = {
            key: flow for key, flow in self._flows.items() if flow.active or (flow.received > self._now and not is_idle)
        }


class Item:
    """One item of a flow. Items with lower numbers are older."""

    __slots__ = ("_place", "cost_s", "flow", "number", "size")

    def __init__(self, number: int, flow: Flow, size: int = 0) -> None:
        """``size`` is that of the item's inputs, in bytes. Among flows that have received equal work, small items start first."""
        self.number = number
        self.flow = flow
        self.size = size
        self.cost_s = 0.0
        self._place: float | None = None
        """What the flow had received when the item was started."""

    @property
    def is_started(self) -> bool:
        """True if a step of the item, or of a newer item of its flow, has been started."""
        return self.number <= self.flow.newest

    @property
    def rank(self) -> tuple[float, int]:
        """The item with the lowest rank goes first."""
        if self._place is not None:
            return self._place + max(0.0, self.cost_s - _KEPT_S), self.number
        return self.flow.received + self.flow.owner.expected_s(self.size), self.number

    def start(self) -> None:
        """Record that a step of the item starts."""
        if self._place is None:
            self._place = self.flow.received
        self.flow.newest = max(self.flow.newest, self.number)


class Entry(Protocol):
    """A part of an item that waits in a queue."""

    @property
    def item(self) -> Item: ...

    @property
    def is_cancelled(self) -> bool: ...


_Entry = TypeVar("_Entry", bound=Entry)


def _rank(entry: Entry) -> tuple[float, int]:
    return entry.item.rank


class FairQueue(Generic[_Entry]):
    """Waiting entries: in order of arrival within a flow, and by rank across flows. Not thread-safe."""

    def __init__(self) -> None:
        self._flows: dict[Flow, deque[_Entry]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._flows.values()))

    def __bool__(self) -> bool:
        return bool(self._flows)

    def add(self, entry: _Entry) -> None:
        """Append ``entry`` to the queue of its flow."""
        flow = entry.item.flow
        if (queue := self._flows.get(flow)) is None:
            queue = self._flows[flow] = deque()
        queue.append(entry)

    def first(self, only_started: bool = False) -> _Entry | None:
        """The entry to take next; None if there is none. Removes cancelled entries at the heads of the flows' queues."""
        if len(self._flows) == 1:  # a shortcut for the common case
            (queue,) = self._flows.values()
            if not queue[0].is_cancelled and not only_started:
                return queue[0]
        found, ended = list[_Entry](), list[Flow]()
        for flow, queue in self._flows.items():
            while queue and queue[0].is_cancelled:
                queue.popleft()
            if not queue:
                ended.append(flow)
            elif not only_started or queue[0].item.is_started:
                found.append(queue[0])
        for flow in ended:
            del self._flows[flow]
        if len(found) > 1:
            return min(found, key=_rank)
        return found[0] if found else None

    def remove(self, entry: _Entry) -> None:
        """Remove ``entry``, which ``first`` has just returned."""
        flow = entry.item.flow
        queue = self._flows[flow]
        queue.popleft()
        if not queue:
            del self._flows[flow]
