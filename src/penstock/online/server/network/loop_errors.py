"""Logs uncaught exceptions of the event loop. A lasting shortage of file descriptors is logged only every few seconds."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

_log = logging.getLogger(__name__)

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SILENCE_S = 10.0


class LoopErrors:
    """An exception handler for one event loop."""

    def __init__(self) -> None:
        self._silent_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """See ``loop.set_exception_handler``."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            # Every accept fails until another connection is closed.
            if loop.time() >= self._silent_until:
                self._silent_until = loop.time() + _SILENCE_S
                _log.error("cannot accept connections: %s; raise the limit with `ulimit -n`", error.strerror)
            return
        _log.error("error on the event loop: %s", context.get("message", "an error"), exc_info=error)
