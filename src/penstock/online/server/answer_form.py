"""The form of a response that the client chooses, for all transports."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from penstock.online.server.shared_memory.lease import Lease, Placement


class _Everything:
    """A container that contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


ALL: Container[str] = _Everything()
NONE: Container[str] = frozenset()


class AnswerForm(msgspec.Struct, frozen=True, gc=False):
    """The form of each output. An output that no field mentions has the transport's default form."""

    binary: Container[str] = NONE
    """Outputs to send as raw bytes after the message. May be ``ALL`` or ``NONE``. Test for these two values with ``is``."""
    classification: Mapping[str, int] = {}
    """The outputs to classify. For each, the number of greatest values to return, at least 1."""
    placements: Mapping[str, Placement] = {}
    """The outputs to write into shared memory, each with its place."""
    lease: Lease | None = None
    """The lease on the request's shared memory. It is released once the response is written or the request has failed."""

    def release(self) -> None:
        """Release the shared memory, if any. Idempotent."""
        if self.lease is not None:
            self.lease.release()


TEXT = AnswerForm()
"""All outputs have the transport's default form."""
BINARY = AnswerForm(ALL)
"""All outputs are raw bytes."""
