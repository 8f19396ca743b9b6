"""Tracks the processes that are still loading a model: measures their CPU time, and ends them on request."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from penstock.errors import Unavailable

_log = logging.getLogger(__name__)


class LoadingProcess(Protocol):
    def end_at_once(self) -> None:
        """Kill the process and do not restart it. Any thread may call this."""
        ...

    def used_s(self) -> float | None:
        """CPU seconds that the process has used; None if unknown. Any thread may call it."""
        ...


class Halt:
    """Ends processes that are still loading their models, because a load might never end. Any thread may use this class."""

    def __init__(self, model: str = "") -> None:
        self._model = model
        self.reason = ""
        """The reason why further loads are refused; empty while loads are allowed."""
        self._lock = threading.Lock()
        self._loading: set[LoadingProcess] = set()

    def hold(self, process: LoadingProcess) -> None:
        """Register ``process``, which is about to load its model. Raises Unavailable after ``end``."""
        with self._lock:
            if self.reason:
                raise Unavailable(self.reason)
            self._loading.add(process)

    def release(self, process: LoadingProcess) -> None:
        """Remove ``process``, whose load has ended. Idempotent."""
        with self._lock:
            self._loading.discard(process)

    def used_s(self) -> float | None:
        """CPU seconds that the registered processes have used; None if there are no processes, or if a time is unknown."""
        with self._lock:
            used = [process.used_s() for process in self._loading]
        return None if not used or None in used else sum(filter(None, used))

    def end(self, reason: str) -> None:
        """Kill all registered processes immediately, and refuse further processes."""
        with self._lock:
            self.reason = reason
            loading, self._loading = self._loading, set()
        if loading:
            _log.warning("loading of model '%s' was ended: %s", self._model, reason)
        for process in loading:
            process.end_at_once()
