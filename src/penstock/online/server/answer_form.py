"""The parts of an answer's form that the caller chooses. The same for all transports."""

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
    """How each output is written. An output in none of these is written in the transport's default form."""

    binary: Container[str] = NONE
    """Outputs whose elements follow the message as raw bytes; compare with ``ALL`` and ``NONE`` by identity."""
    classification: Mapping[str, int] = {}
    """Outputs of which only the greatest values are requested, and how many, at least 1."""
    placements: Mapping[str, Placement] = {}
    """Outputs that go into shared memory, and where."""
    lease: Lease | None = None
    """The shared memory that the request uses; released once the answer has been written, or the request has failed."""

    def release(self) -> None:
        """Release the shared memory, if the request uses any. Idempotent."""
        if self.lease is not None:
            self.lease.release()


TEXT = AnswerForm()
"""Everything in the default form."""
BINARY = AnswerForm(ALL)
"""Everything as raw bytes."""
