"""What is fuzzed: something that takes bytes of a stranger."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from tests.fuzz.mutator import Seed


class Target(Protocol):
    """One decoder or connection, made once and given many messages."""

    seeds: Sequence[Seed]
    """Valid messages, in parts."""
    tokens: Sequence[bytes]
    """Words that mean something to it."""

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        """A message of ``parts``, with its own lengths and the like put right again now and then, so that it gets deeper."""

    def run(self, data: bytes) -> None:
        """Take ``data``, which is wrong in whatever way, and then something valid. Raises what should not have happened."""

    def close(self) -> None:
        """Leave the process as it was found."""
