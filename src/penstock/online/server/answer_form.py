"""How the answer to a request is to be written, as far as the caller may choose. The same for all transports."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from penstock.online.server.shared_memory.registry import Lease, Placement


class _Everything:
    """Contains all names."""

    def __contains__(self, name: object) -> bool:
        return True


ALL: Container[str] = _Everything()
NONE: Container[str] = frozenset()


class AnswerForm(msgspec.Struct, frozen=True, gc=False):
    """What each output becomes. One that is in none of these is written as the transport writes it by default."""

    binary: Container[str] = NONE
    """Outputs whose elements follow the message as raw bytes; ``ALL`` and ``NONE`` are told apart by identity."""
    classification: Mapping[str, int] = {}
    """Outputs of which only the greatest values are wanted: their number, at least 1."""
    placements: Mapping[str, Placement] = {}
    """Outputs that go into shared memory, and where."""
    lease: Lease | None = None
    """The shared memory that the request uses; to be released once the answer is written, or there will be none."""

    def release(self) -> None:
        """Let go of the shared memory, if any is used. Idempotent."""
        if self.lease is not None:
            self.lease.release()


TEXT = AnswerForm()
"""Everything in the default form."""
BINARY = AnswerForm(ALL)
"""Everything as raw bytes."""
