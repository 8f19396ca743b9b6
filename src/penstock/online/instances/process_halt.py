"""Ending processes that are still loading their models, which may never come to an end by themselves."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from penstock.errors import Unavailable

_log = logging.getLogger(__name__)


class Endable(Protocol):
    def end_at_once(self) -> None:
        """End the process, whatever it is at, and start it no more. Any thread may call it."""
        ...


class Halt:
    """For one or more loads; any thread may use it."""

    def __init__(self) -> None:
        self.reason = ""
        """Why nothing is loaded any more; empty while it is."""
        self._lock = threading.Lock()
        self._loading: set[Endable] = set()

    def hold(self, process: Endable) -> None:
        """End ``process``, which is about to load its model, along with the others. Raises Unavailable if they have been ended."""
        with self._lock:
            if self.reason:
                raise Unavailable(self.reason)
            self._loading.add(process)

    def release(self, process: Endable) -> None:
        """Leave ``process`` alone, as it has loaded its model, or cannot; idempotent."""
        with self._lock:
            self._loading.discard(process)

    def end(self, reason: str) -> None:
        """End all that is held, at once, and let nothing more be loaded."""
        with self._lock:
            self.reason = reason
            loading, self._loading = self._loading, set()
        for process in loading:
            _log.warning("a process that is still loading its model is ended: %s", reason)
            process.end_at_once()
