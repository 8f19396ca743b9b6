"""Ends processes that are still loading their models."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from penstock.errors import Unavailable

_log = logging.getLogger(__name__)


class Endable(Protocol):
    def end_at_once(self) -> None:
        """Kill the process and do not restart it. Any thread may call it."""
        ...


class Halt:
    """Ends processes that are still loading their models; such a load might never end by itself. Any thread may use it."""

    def __init__(self, model: str = "") -> None:
        self._model = model
        self.reason = ""
        """The reason why loading is refused; empty while it is allowed."""
        self._lock = threading.Lock()
        self._loading: set[Endable] = set()

    def hold(self, process: Endable) -> None:
        """Register ``process``, which is about to load its model. Raises Unavailable after ``end``."""
        with self._lock:
            if self.reason:
                raise Unavailable(self.reason)
            self._loading.add(process)

    def release(self, process: Endable) -> None:
        """Remove ``process``, whose load has ended. Idempotent."""
        with self._lock:
            self._loading.discard(process)

    def end(self, reason: str) -> None:
        """Kill all registered processes at once, and refuse further ones."""
        with self._lock:
            self.reason = reason
            loading, self._loading = self._loading, set()
        if loading:
            _log.warning("loading of model '%s' was ended: %s", self._model, reason)
        for process in loading:
            process.end_at_once()
