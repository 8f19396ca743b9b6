"""Ends processes that are still loading their models."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from penstock.errors import Unavailable

_log = logging.getLogger(__name__)


class Endable(Protocol):
    def end_at_once(self) -> None:
        """Kill the process and do not restart it. Any thread may call this."""
        ...


class Halt:
    """Ends processes that are still loading their models, because a load might never end. Any thread may use this class."""

    def __init__(self, model: str = "") -> None:
        self._model = model
        self.reason = ""
        """The reason why further loads are refused; empty while loads are allowed."""
        self._lock = threading.Lock()
        self._loading: set[Endable] = set()

    def hold(self, process: Endable) -> None:
        """Register ``process`` before it loads its model. Raises Unavailable after ``end``."""
        with self._lock:
            if self.reason:
                raise Unavailable(self.reason)
            self._loading.add(process)

    def release(self, process: Endable) -> None:
        """Remove ``process`` after its load has ended. Idempotent."""
        with self._lock:
            self._loading.discard(process)

    def end(self, reason: str) -> None:
        """Kill all registered processes immediately, and refuse further processes."""
        with self._lock:
            self.reason = reason
            loading, self._loading = self._loading, set()
        if loading:
            _log.warning("loading of model '%s' was ended: %s", self._model, reason)
        for process in loading:
            process.end_at_once()
