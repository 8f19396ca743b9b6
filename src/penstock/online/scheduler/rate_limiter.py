"""Which instances may run at once: each holds the resources that its configuration names while it runs, across all models.

Resources are only names and counts. Of the instances that wait, one of priority n runs 1/n as often as one of priority 1 (stride
scheduling, Waldspurger and Weihl, 1995), and none starves: the resources that one waits for are given to no instance behind it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from penstock.errors import InvalidConfig


class RateLimiter:
    """``available`` is how much there is of each resource; empty: of each as much as the instance needs that needs the most of it.

    Any thread may use it.
    """

    def __init__(self, available: Mapping[str, int] = {}) -> None:
        self._available = dict(available)
        self.lock = threading.Lock()
        # The rest, and all of the gates but their needs, is guarded by the lock.
        self.gates: set[Gate] = set()
        self.waiting: list[Gate] = []
        self.held: Counter[str] = Counter()
        self.turn = 0
        """The latest turn that has come."""

    def gate(self, model: str, needs: Mapping[str, int], priority: int = 1) -> Gate | None:
        """For one instance of ``model``, which holds ``needs`` while it runs; None if it needs nothing.

        Raises InvalidConfig if it needs more than there is.
        """
        for name, count in needs.items():
            if self._available and count > (most := self._available.get(name, 0)):
                raise InvalidConfig(
                    f"model '{model}': Resource count for \"{name}\" is limited to {most} which will prevent "
                    f"scheduling of one or more model instances, the minimum required count is {count}",
                    "raise '--rate-limit-resource', or lower the count in 'rate_limiter'",
                )
        return Gate(self, needs, max(1, priority)) if needs else None

    def grant(self) -> None:
        """Let in everybody whose turn it is and for whom there is enough."""
        taken: set[str] = set()
        for gate in sorted(self.waiting, key=lambda gate: gate.turn):
            if taken.isdisjoint(gate.needs) and self._suffices(gate.needs):
                self.waiting.remove(gate)
                self.held.update(gate.needs)
                self.turn = max(self.turn, gate.turn)
                gate.turn += gate.priority
                gate.held = True
                gate.granted.release()
            else:
                taken.update(gate.needs)

    def _suffices(self, needs: Mapping[str, int]) -> bool:
        return all(self.held[name] + count <= self._most(name) for name, count in needs.items())

    def _most(self, name: str) -> int:
        if self._available:
            return self._available.get(name, 0)
        return max(gate.needs.get(name, 0) for gate in self.gates)


class Gate:
    """Where one instance waits for its resources; it belongs to that instance's thread."""

    def __init__(self, limiter: RateLimiter, needs: Mapping[str, int], priority: int) -> None:
        self.needs = needs
        self.priority = priority
        self.turn = 0
        """Orders the waiting gates; a gate that runs moves on by its priority."""
        self.held = False
        self.granted = threading.Semaphore(0)
        self._limiter = limiter

    def open(self) -> None:
        """Make its needs known, before the first ``enter``."""
        with self._limiter.lock:
            self._limiter.gates.add(self)

    def enter(self) -> None:
        """Give back what is held, and wait until it is this one's turn and all that it needs is there."""
        self.ask()
        self.granted.acquire()

    def ask(self) -> None:
        """As ``enter``, but ``granted`` is to be waited for."""
        limiter = self._limiter
        with limiter.lock:
            self._give_back()
            self.turn = max(self.turn, limiter.turn)
            limiter.waiting.append(self)
            limiter.grant()

    def leave(self, unused: bool = False) -> None:
        """Give back what is held, if anything; ``unused`` says that nothing ran, so that the turn is kept."""
        if self.held:
            with self._limiter.lock:
                self.turn -= self.priority if unused else 0
                self._give_back()
                self._limiter.grant()

    def close(self) -> None:
        """Give back what is held and be gone."""
        with self._limiter.lock:
            self._give_back()
            self._limiter.gates.discard(self)
            self._limiter.grant()

    def _give_back(self) -> None:
        if self.held:
            self.held = False
            self._limiter.held.subtract(self.needs)


def read_resources(texts: Iterable[str]) -> dict[str, int]:
    """``name:count`` or ``name:count:device``, as options give them, by name; there is one device. Raises InvalidConfig."""
    resources: dict[str, int] = {}
    for text in texts:
        name, _, rest = text.partition(":")
        count, *device = rest.split(":")
        if not name or not all(part.isdecimal() for part in (count, *device)) or len(device) > 1 or len(rest) > 20:
            raise InvalidConfig(f"'{text}' is no resource", "write name:count, e.g. R1:4")
        resources[name] = max(resources.get(name, 0), int(count))
    return resources
