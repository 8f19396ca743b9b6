"""The seam between an HTTP/2 session and its connection."""

from __future__ import annotations

from typing import Protocol

from penstock.protocol.h2_frames import ConnectionFault


class Owner(Protocol):
    """The connection, as its session uses it."""

    def hang_up_later(self) -> None:
        """Called when the last stream has ended and no new ones are accepted."""

    def continue_later(self) -> None:
        """Give the session further units, and call ``go_on``, in a later iteration of the event loop."""

    def fail_later(self, fault: ConnectionFault) -> None:
        """End the connection after the running callback."""


class NoOwner:
    """The owner of a session whose connection is closed."""

    def hang_up_later(self) -> None:
        pass

    def continue_later(self) -> None:
        pass

    def fail_later(self, fault: ConnectionFault) -> None:
        pass
