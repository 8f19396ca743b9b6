"""Random attacks for the soak test, on a server that also has other work."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection

from benchmarks.attacks.catalog import ATTACKS
from benchmarks.attacks.process import attacking
from benchmarks.servers import Server

_SECONDS = (2.0, 5.0)
"""Minimum and maximum seconds of one attack."""


class Strikes:
    """Runs the attacks ``names`` on ``server``, one after the other. ``done`` counts the attacks by name."""

    def __init__(self, server: Server, names: Collection[str] = tuple(ATTACKS), seed: int = 0) -> None:
        self.done: Counter[str] = Counter()
        self._server = server
        self._names = sorted(names)
        self._random = random.Random(seed)
        self._due: list[str] = []

    async def strike(self, seconds: float | None = None) -> str:
        """Run the next attack to its end. No attack runs a second time before every attack has run once. Raises RuntimeError if
        the attack fails.
        """
        if not self._due:
            self._due = self._random.sample(self._names, len(self._names))
        name = self._due.pop()
        await asyncio.to_thread(self._run, name, seconds or self._random.uniform(*_SECONDS))
        self.done[name] += 1
        return name

    def _run(self, name: str, seconds: float) -> None:
        with attacking(name, self._server, seconds) as attackers:
            attackers.finish(seconds)
