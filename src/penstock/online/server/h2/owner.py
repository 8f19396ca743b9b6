"""The part of a connection's interface that an HTTP/2 session uses."""

from __future__ import annotations

from typing import Protocol

from penstock.protocol.h2_frames import ConnectionFault


class Owner(Protocol):
    """The connection that owns a session."""

    def hang_up_later(self) -> None:
        """Called when the last stream has ended and new streams are not accepted."""

    def continue_later(self) -> None:
        """In a later event-loop iteration, give the session's ``calls`` more units, and call ``calls.go_on``."""

    def fail_later(self, fault: ConnectionFault) -> None:
        """End the connection once the current callback has returned."""


class NoOwner:
    """The owner of a session whose connection is closed."""

    def hang_up_later(self) -> None:
        pass

    def continue_later(self) -> None:
        pass

    def fail_later(self, fault: ConnectionFault) -> None:
        pass
