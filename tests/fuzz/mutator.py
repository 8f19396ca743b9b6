"""Makes hostile messages of valid ones: a seed is a message in parts, and both the parts and the bytes in them are tampered with.

Everything follows from the random generator that is passed in, so a finding is found again with the same seed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

Seed = tuple[bytes, ...]
"""A valid message in parts that mean something: lines, frames, fields, words."""

_MAX_PARTS = 400
_MAX_BYTES = 1 << 17
_DIGITS = re.compile(rb"\d+")
_BYTES = b"\x00\x01\x7f\x80\xff\r\n \t\"'\\{}[]:,;%/0-"
_NUMBERS = (
    -1,
    0,
    1,
    2,
    3,
    7,
    127,
    128,
    255,
    256,
    1023,
    65535,
    65536,
    1 << 24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
)
_HUGE = (2**48, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)


class Mutator:
    """Draws messages made from ``seeds`` and, now and then, one of the ``tokens`` that mean something to the receiver."""

    def __init__(self, seeds: Sequence[Seed], tokens: Sequence[bytes], random: Random) -> None:
        self._seeds = list(seeds)
        self._tokens = tokens
        self.random = random

    def learn(self, parts: Sequence[bytes]) -> None:
        """Draw further messages from ``parts``, too."""
        if parts:
            self._seeds.append(tuple(parts))

    def draw(self) -> list[bytes]:
        """The parts of the next message; one in twenty is valid."""
        random = self.random
        parts = list(random.choice(self._seeds))
        if random.random() < 0.05:
            return parts
        while True:
            random.choice(_ON_PARTS if random.random() < 0.35 else _ON_BYTES)(self, parts)
            if random.random() < 0.45:
                break
        del parts[_MAX_PARTS:]
        return parts if sum(map(len, parts)) <= _MAX_BYTES else [b"".join(parts)[:_MAX_BYTES]]

    # On parts

    def _remove(self, parts: list[bytes]) -> None:
        if parts:
            start = self.random.randrange(len(parts))
            del parts[start : start + self.random.choice((1, 1, 1, 2, 5))]

    def _repeat(self, parts: list[bytes]) -> None:
        if parts:
            at = self.random.randrange(len(parts))
            parts[at:at] = parts[at : at + self.random.choice((1, 1, 3))] * self.random.choice((1, 1, 2, 40))

    def _swap(self, parts: list[bytes]) -> None:
        if parts:
            first, second = self.random.randrange(len(parts)), self.random.randrange(len(parts))
            parts[first], parts[second] = parts[second], parts[first]

    def _splice(self, parts: list[bytes]) -> None:
        other = self.random.choice(self._seeds)
        parts[self.random.randint(0, len(parts)) :] = other[self.random.randint(0, len(other)) :]

    def _append(self, parts: list[bytes]) -> None:
        parts += self.random.choice(self._seeds)

    def _transplant(self, parts: list[bytes]) -> None:
        parts.insert(self.random.randint(0, len(parts)), self.random.choice(self.random.choice(self._seeds)))

    def _insert_token(self, parts: list[bytes]) -> None:
        if self._tokens:
            parts.insert(self.random.randint(0, len(parts)), self.random.choice(self._tokens))

    def _cut_off(self, parts: list[bytes]) -> None:
        del parts[self.random.randint(0, len(parts)) :]

    # On the bytes of one part

    def _flip(self, part: bytearray) -> None:
        part[self.random.randrange(len(part))] ^= 1 << self.random.randrange(8)

    def _set(self, part: bytearray) -> None:
        part[self.random.randrange(len(part))] = self.random.choice(_BYTES)

    def _delete(self, part: bytearray) -> None:
        start = self.random.randrange(len(part))
        del part[start : start + self.random.choice((1, 1, 2, 4, 16))]

    def _double(self, part: bytearray) -> None:
        start = self.random.randrange(len(part))
        part[start:start] = part[start : start + self.random.choice((1, 4, 64))] * self.random.choice((1, 1, 3, 200))

    def _noise(self, part: bytearray) -> None:
        start = self.random.randrange(len(part))
        part[start:start] = self.random.randbytes(self.random.choice((1, 2, 8)))

    def _token(self, part: bytearray) -> None:
        start = self.random.randrange(len(part))
        stop = start + self.random.choice((0, 0, 4))
        part[start:stop] = self.random.choice(self._tokens) if self._tokens else b"\0"

    def _written_number(self, part: bytearray) -> None:
        """A length, count or dimension in text that lies."""
        found = list(_DIGITS.finditer(part))
        if found:
            one = self.random.choice(found)
            number = self.random.choice((*_NUMBERS, *_HUGE, int(one[0][:40]) + 1, int(one[0][:40]) - 1))
            part[one.start() : one.end()] = b"%d" % number

    def _stored_number(self, part: bytearray) -> None:
        """The same in bytes."""
        size = self.random.choice((1, 2, 3, 4, 8))
        if len(part) >= size:
            start = self.random.randint(0, len(part) - size)
            order = self.random.choice(("little", "big"))
            if self.random.random() < 0.4:
                number = int.from_bytes(part[start : start + size], order) + self.random.choice((-1, 1))
            else:
                number = self.random.choice(_NUMBERS)
            part[start : start + size] = (number % (1 << 8 * size)).to_bytes(size, order)

    def _shorten(self, part: bytearray) -> None:
        del part[self.random.randrange(len(part)) :]


def _on_bytes(change: Callable[[Mutator, bytearray], None]) -> Callable[[Mutator, list[bytes]], None]:
    def apply(mutator: Mutator, parts: list[bytes]) -> None:
        filled = [index for index, part in enumerate(parts) if part]
        if filled:
            index = mutator.random.choice(filled)
            part = bytearray(parts[index])
            change(mutator, part)
            parts[index] = bytes(part)

    return apply


_ON_PARTS: Sequence[Callable[[Mutator, list[bytes]], None]] = (
    Mutator._remove,
    Mutator._repeat,
    Mutator._swap,
    Mutator._splice,
    Mutator._append,
    Mutator._transplant,
    Mutator._insert_token,
    Mutator._cut_off,
)
_ON_BYTES = tuple(
    map(
        _on_bytes,
        (
            Mutator._flip,
            Mutator._set,
            Mutator._delete,
            Mutator._double,
            Mutator._noise,
            Mutator._token,
            Mutator._written_number,
            Mutator._stored_number,
            Mutator._shorten,
        ),
    )
)
