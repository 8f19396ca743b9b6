"""The form of a response that the client chooses, for all transports."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from penstock.online.server.shared_memory.lease import Lease, Placement


class _Everything:
    """A container of every name."""

    def __contains__(self, name: object) -> bool:
        return True


ALL: Container[str] = _Everything()
NONE: Container[str] = frozenset()


class AnswerForm(msgspec.Struct, frozen=True, gc=False):
    """The form of each output. Outputs that no field names have the transport's default form."""

    binary: Container[str] = NONE
    """Outputs whose elements follow the message as raw bytes; compare it with ``ALL`` and ``NONE`` by identity."""
    classification: Mapping[str, int] = {}
    """Number of greatest values to return, at least 1, for each classified output."""
    placements: Mapping[str, Placement] = {}
    """Shared memory to write outputs into, by output."""
    lease: Lease | None = None
    """The shared memory in use; released once the response is written or the request has failed."""

    def release(self) -> None:
        """Release the shared memory, if any. Idempotent."""
        if self.lease is not None:
            self.lease.release()


TEXT = AnswerForm()
"""All outputs in the default form."""
BINARY = AnswerForm(ALL)
"""All outputs as raw bytes."""
