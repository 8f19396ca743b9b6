"""What a Python model can ask of the process that it lives in, and the stages whose time it tells."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from penstock.errors import Unavailable, Unsupported
from penstock.request import Done, InferRequest

_log = logging.getLogger(__name__)


class Host:
    """This one is for a model without a server around it. All may be called from any thread."""

    def call(self, request: InferRequest, done: Done, decoupled: bool) -> Callable[[], None]:
        """Have another model answer; ``done`` is called on a thread that it must not block. What is returned gives the request up."""
        raise Unsupported(f"there is no server here that could ask model '{request.model_name}'")

    def say(self, level: int, text: str) -> None:
        """Write a line into the server's log; ``level`` is one of ``logging``'s."""
        _log.log(level, "%s", text)

    def measure(self, metric: Metered, value: float, replaces: bool) -> None:
        """Add ``value`` to what the server's page of metrics shows of ``metric``, or have it ``replaces`` that."""

    def later(self, call: Callable[[], object]) -> None:
        """Call ``call`` soon, on another thread: destructors run on any, which may hold any lock."""


class Metered(NamedTuple):
    """A metric that a model keeps of itself."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: dict[str, str]


class Here:
    """The one model of this process. What models import by name has nowhere else to look."""

    def __init__(self) -> None:
        self.host = Host()
        self.name = ""
        self.folder = ""
        """Of the model's version."""
        self.measured: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        """Values of the metrics that it keeps, by name and labels; guarded by ``measuring``."""
        self.measuring = threading.Lock()
        self.waits_for_itself = False
        """Whether a question of the main thread to this very model could never be answered."""

    def ask(self, request: InferRequest, done: Done, decoupled: bool) -> Callable[[], None]:
        """As ``Host.call``, for the model's own code: a question that the model would wait for for ever is refused."""
        itself = self.waits_for_itself and request.model_name == self.name
        if itself and threading.current_thread() is threading.main_thread():
            done(Unavailable(f"model '{self.name}' has one instance, which would wait for itself", "give it another"))
            return lambda: None
        return self.host.call(request, done, decoupled)


here = Here()


class Stages:
    """How often and how long the stages of a model ran since they were last taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, int]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            with self._lock:
                count, total_ns = self._totals.get(name, (0, 0))
                self._totals[name] = count + 1, total_ns + time.perf_counter_ns() - started_ns

    def take(self) -> dict[str, tuple[int, int]]:
        with self._lock:
            totals, self._totals = self._totals, {}
        return totals
