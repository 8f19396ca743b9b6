"""Fuzzes the limits of clients: rate, concurrency, priority and the bytes of all requests, in any order of events."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.clock import ManualClock
from penstock.errors import Cancelled, PermissionDenied, ResourceExhausted, Unavailable
from penstock.online.server.access.admission import Admission, ByteBudget, Reservation
from penstock.online.server.access.auth import Access
from penstock.request import Done, InferRequest, InferResponse
from tests.fuzz.mutator import Seed
from tests.fuzz.target import Script, Target

_KEYS = b"""
[clients.slow]
key = "0123456789abcdef slow"
requests_per_second = 2
burst = 3
[clients.few]
key = "0123456789abcdef few"
max_concurrent = 2
highest_priority = 2
[clients.free]
key = "0123456789abcdef free"
models = ["m*"]
"""
_CLIENTS = ("slow", "few", "free")
_LIMIT = 200


class AdmissionTarget(Target):
    """See ``Target``."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "keys.toml")
        path.write_bytes(_KEYS)
        self._clock = ManualClock()
        self._access = Access(path, self._clock)
        self.seeds: Sequence[Seed] = [
            tuple(bytes((n * step % 241,)) for n in range(start, start + 60))
            for start in range(4)
            for step in (1, 3, 11)
        ]

    def run(self, data: bytes) -> None:
        script, clock = Script(data[:1000]), self._clock
        admission, budget = Admission(self._access, clock), ByteBudget(_LIMIT)
        began, entered = clock.now(), 0
        running: list[tuple[str, Done]] = []
        held: list[Reservation] = [Reservation(budget) for _ in range(3)]
        while not script.is_over:
            match script.number(5):
                case 0 | 1:
                    client = script.choice(_CLIENTS)
                    is_in = self._enter(admission, client, script.number(4), running)
                    entered += is_in and client == "slow"
                    assert entered <= 3 + 2 * (clock.now() - began) + 1e-6, "the client exceeds its rate"
                case 2 if running:
                    client, done = running.pop(script.number(len(running)))
                    done(Cancelled("over") if script.number(2) else InferResponse("m", "1", {}))
                    done(Cancelled("twice"))
                case 3:
                    self._take(script, held)
                    assert 0 <= budget.used <= _LIMIT
                case _:
                    clock.advance(script.number(40) / 16)
            counts = Counter(client for client, _ in running)
            assert counts["few"] <= 2, "the client exceeds its concurrency"
        for reservation in held:
            reservation.release()
        assert budget.used == 0
        for _, done in running:
            done(Cancelled("over"))
        assert all(usage.running == 0 for usage in admission._usage.values()), "a request is still counted"

    @staticmethod
    def _enter(admission: Admission, client: str, priority: int, running: list[tuple[str, Done]]) -> bool:
        """Whether the request has passed the check of its rate."""
        try:
            admission.enter(client)
        except ResourceExhausted:
            return False
        request = InferRequest("model", {}, client=client, priority=priority)
        try:
            running.append((client, admission.admit(request, lambda outcome: None)))
        except PermissionDenied:
            assert client == "few"
            assert priority == 1
        return True

    @staticmethod
    def _take(script: Script, held: list[Reservation]) -> None:
        reservation = held[script.number(len(held))]
        if script.number(3):
            with suppress(Unavailable):
                reservation.take(script.number(120))
        else:
            reservation.release()

    def close(self) -> None:
        self._folder.cleanup()
