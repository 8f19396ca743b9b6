"""The form of a response that the client chooses, for all transports."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from penstock.online.server.shared_memory.lease import Lease, Placement


class _Everything:
    """A container for which every name is a member."""

    def __contains__(self, name: object) -> bool:
        return True


ALL: Container[str] = _Everything()
NONE: Container[str] = frozenset()


class AnswerForm(msgspec.Struct, frozen=True, gc=False):
    """The form of each output. An output that appears in no field has the transport's default form."""

    binary: Container[str] = NONE
    """Outputs whose elements follow the message as raw bytes; compare the field with ``ALL`` and ``NONE`` by identity."""
    classification: Mapping[str, int] = {}
    """For each classified output, the number of greatest values to return, at least 1."""
    placements: Mapping[str, Placement] = {}
    """For each output to write into shared memory, its region."""
    lease: Lease | None = None
    """The lease on shared memory in use; released once the response is written or the request has failed."""

    def release(self) -> None:
        """Release the shared memory, if any. Idempotent."""
        if self.lease is not None:
            self.lease.release()


TEXT = AnswerForm()
"""All outputs in the default form."""
BINARY = AnswerForm(ALL)
"""All outputs as raw bytes."""
