"""What is fuzzed: anything that takes the bytes of a stranger, or a state machine that a stranger's requests drive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TypeVar

import numpy as np

from penstock.errors import PenstockError
from penstock.tensor import Array
from tests.fuzz import parts
from tests.fuzz.mutator import Seed

_Choice = TypeVar("_Choice")


class Target(ABC):
    """One decoder, connection or state machine, made once and given many messages."""

    seeds: Sequence[Seed]
    """Valid messages, in parts."""
    tokens: Sequence[bytes] = ()
    """Words that mean something to it."""
    growth_factor = 1
    """How many times the usual memory a campaign may leave behind."""
    peak_factor = 1
    """How many times the usual memory one message may take."""
    slice_runs = 300
    """Messages in a slice of every test run."""
    slice_seed: int | None = None
    """Seed of the slice; None: another one each day."""

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        """The message of ``parts``. Often corrects lengths and checksums in it, so that it gets past the first checks."""
        return b"".join(parts)

    def split(self, data: bytes) -> Seed:
        """The parts of a message of the corpus."""
        return parts.pieces(data)

    @abstractmethod
    def run(self, data: bytes) -> None:
        """Take ``data``, which may be wrong in any way, and then something valid. Raises what should not have happened."""

    def close(self) -> None:  # noqa: B027 - most targets hold nothing
        """Leave the process as it was found."""


class DecoderTarget(Target):
    """A function of the message: what it returns for a valid message never changes."""

    def __init__(self, seeds: Sequence[Seed]) -> None:
        self.seeds = seeds
        self._valid = [b"".join(seed) for seed in seeds]
        self._meant = [self.outcome(data) for data in self._valid]
        self._turn = 0

    @abstractmethod
    def decode(self, data: bytes) -> object:
        """Decode ``data``, check the result, and return something that can be compared."""

    def outcome(self, data: bytes) -> object:
        """What ``decode`` returns, or the code and text of its error. Raises all other errors."""
        return attempt(partial(self.decode, data))

    def run(self, data: bytes) -> None:
        self.outcome(data)
        self._turn = (self._turn + 1) % len(self._valid)
        meant = self.outcome(self._valid[self._turn])
        assert meant == self._meant[self._turn], f"a valid message is decoded as {meant}"


def attempt(work: Callable[[], object]) -> object:
    """What ``work`` returns, or the code and text of its error. Raises all other errors."""
    try:
        return work()
    except PenstockError as error:
        return error.code, str(error)


class Script:
    """A message as a series of choices, for state machines."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def is_over(self) -> bool:
        return self._position >= len(self._data)

    def number(self, limit: int) -> int:
        """The next number below ``limit``, which is at most 256."""
        self._position += 1
        return self._data[self._position - 1] % limit if self._position <= len(self._data) else 0

    def choice(self, choices: Sequence[_Choice]) -> _Choice:
        return choices[self.number(len(choices))]


def contents(array: Array) -> tuple[object, ...]:
    """``array`` in a form that can be compared."""
    data = repr(array.tolist()) if array.dtype == np.object_ else np.ascontiguousarray(array).tobytes()
    return array.dtype.str, array.shape, data
