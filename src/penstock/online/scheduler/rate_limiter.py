"""Limits which instances run at the same time: each instance holds its configured resources while it runs.

A resource has a name and a count, and all models share it. A waiting instance of priority n runs 1/n as often as an instance of
priority 1 (stride scheduling, Waldspurger and Weihl, 1995). No instance starves, because a resource that a waiting instance needs is
not given to later instances.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from penstock.errors import InvalidConfig


class RateLimiter:
    """``available`` maps each resource to its count. If empty, the count of a resource is the largest count that an instance needs.

    Any thread may use it.
    """

    def __init__(self, available: Mapping[str, int] = {}) -> None:
        self._available = dict(available)
        self.lock = threading.Lock()
        # The lock guards the other attributes of the limiter, and the attributes of its gates.
        self.gates: set[ResourceGate] = set()
        self.waiting: list[ResourceGate] = []
        self.held: Counter[str] = Counter()
        self.turn = 0
        """The highest ``turn`` of the gates that were opened so far."""

    def gate(self, model: str, needs: Mapping[str, int], priority: int = 1) -> ResourceGate | None:
        """The gate of one instance of ``model``, which holds ``needs`` while it runs. None if ``needs`` is empty.

        Raises InvalidConfig if the instance needs more than ``available``.
        """
        for name, count in needs.items():
            if self._available and count > (most := self._available.get(name, 0)):
                raise InvalidConfig(
                    f"model '{model}': Resource count for \"{name}\" is limited to {most} which will prevent "
                    f"scheduling of one or more model instances, the minimum required count is {count}",
                    "raise '--rate-limit-resource', or lower the count in 'rate_limiter'",
                )
        return ResourceGate(self, needs, max(1, priority)) if needs else None

    def grant(self) -> None:
        """Open the gates whose turn it is and whose resources are available."""
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
        available: Mapping[str, int] = self._available
        if not available:
            available = {name: max(gate.needs.get(name, 0) for gate in self.gates) for name in needs}
        return all(self.held[name] + count <= available.get(name, 0) for name, count in needs.items())


class ResourceGate:
    """A gate at which one instance waits for its resources; used only on the instance's thread."""

    def __init__(self, limiter: RateLimiter, needs: Mapping[str, int], priority: int) -> None:
        self.needs = needs
        self.priority = priority
        self.turn = 0
        """Waiting gates open in ascending order of ``turn``. Each run adds the priority to the gate's ``turn``."""
        self.held = False
        self.granted = threading.Semaphore(0)
        self._limiter = limiter

    def open(self) -> None:
        """Register the gate's needs. Call this before the first ``enter``."""
        with self._limiter.lock:
            self._limiter.gates.add(self)

    def enter(self) -> None:
        """Release any held resources, and wait for this gate's next turn."""
        self.ask()
        self.granted.acquire()

    def ask(self) -> None:
        """Like ``enter``, but return immediately. The caller then waits for ``granted``."""
        limiter = self._limiter
        with limiter.lock:
            self._give_back()
            self.turn = max(self.turn, limiter.turn)
            limiter.waiting.append(self)
            limiter.grant()

    def leave(self, unused: bool = False) -> None:
        """Release any held resources. With ``unused``, the gate keeps its turn, because nothing ran."""
        if self.held:
            with self._limiter.lock:
                self.turn -= self.priority if unused else 0
                self._give_back()
                self._limiter.grant()

    def close(self) -> None:
        """Release any held resources, and unregister the gate."""
        with self._limiter.lock:
            self._give_back()
            self._limiter.gates.discard(self)
            self._limiter.grant()

    def _give_back(self) -> None:
        if self.held:
            self.held = False
            self._limiter.held.subtract(self.needs)


def read_resources(texts: Iterable[str]) -> dict[str, int]:
    """Parse ``name:count`` or ``name:count:device`` from the command line. The device is ignored. Raises InvalidConfig."""
    resources: dict[str, int] = {}
    for text in texts:
        name, _, rest = text.partition(":")
        count, *device = rest.split(":")
        if not name or not all(part.isdecimal() for part in (count, *device)) or len(device) > 1 or len(rest) > 20:
            raise InvalidConfig(f"'{text}' is not a resource", "write name:count, e.g. R1:4")
        resources[name] = max(resources.get(name, 0), int(count))
    return resources
