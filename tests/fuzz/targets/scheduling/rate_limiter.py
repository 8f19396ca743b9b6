"""Fuzzes the rate limiter: any order of instances that ask for their turn, leave and close."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from penstock.errors import InvalidConfig
from penstock.online.scheduler.rate_limiter import RateLimiter, ResourceGate, read_resources
from tests.fuzz.mutator import Seed
from tests.fuzz.target import Script, Target

_NAMES = ("R", "S", "T")


class RateLimiterTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (b"R:4", b"S:1:0", b":", b"\xd9\xa3", b"9" * 20)

    def __init__(self) -> None:
        self.seeds: Sequence[Seed] = [
            tuple(bytes((n * step % 247,)) for n in range(start, start + 50))
            for start in range(4)
            for step in (1, 5, 11)
        ]

    def run(self, data: bytes) -> None:
        with suppress(InvalidConfig):
            assert all(count >= 0 for count in read_resources([data[:60].decode("latin-1")]).values())
        script = Script(data[:1000])
        available = {name: 1 + script.number(4) for name in _NAMES} if script.number(2) else {}
        limiter = RateLimiter(available)
        gates = self._gates(limiter, script)
        for gate in gates:
            gate.open()
        waiting: list[ResourceGate] = []
        while gates and not script.is_over:
            gate = gates[script.number(len(gates))]
            if gate in waiting:
                pass
            elif script.number(3):
                gate.ask()
                waiting.append(gate)
            else:
                gate.leave(unused=bool(script.number(2)))
            self._settle(limiter, waiting, available)
        self._end(limiter, gates, waiting, available)

    @staticmethod
    def _gates(limiter: RateLimiter, script: Script) -> list[ResourceGate]:
        gates = []
        for _ in range(script.number(6)):
            needs = {name: script.number(4) for name in _NAMES if script.number(2)}
            try:
                gate = limiter.gate("m", needs, script.number(4))
            except InvalidConfig:
                continue
            gates += [gate] if gate is not None else []
        return gates

    @staticmethod
    def _settle(limiter: RateLimiter, waiting: list[ResourceGate], available: dict[str, int]) -> None:
        """Take the granted turns, and check that no more is held than there is."""
        for gate in list(waiting):
            if gate.granted.acquire(blocking=False):
                assert gate.held
                waiting.remove(gate)
        assert set(waiting) == set(limiter.waiting)
        held: Counter[str] = Counter()
        for gate in limiter.gates:
            held.update(gate.needs if gate.held else {})
        assert {name: count for name, count in limiter.held.items() if count} == {n: c for n, c in held.items() if c}
        for name, count in held.items():
            most = available[name] if available else max(gate.needs.get(name, 0) for gate in limiter.gates)
            assert count <= most, f"{count} of {most} are held of {name}"

    def _end(
        self, limiter: RateLimiter, gates: list[ResourceGate], waiting: list[ResourceGate], available: dict[str, int]
    ) -> None:
        """Whoever waits gets a turn once the others leave."""
        for _ in range(len(gates) + 1):
            for gate in gates:
                if gate not in waiting:
                    gate.leave()
            self._settle(limiter, waiting, available)
        assert not waiting, "an instance waits in vain"
        for gate in gates:
            gate.close()
        assert not limiter.gates
        assert not +limiter.held
