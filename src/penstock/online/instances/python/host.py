"""The services that a server offers to the Python model in this process, and the timing of the model's stages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from penstock.errors import Unavailable, Unsupported
from penstock.online.instances.process_channel import MetricChanged, Stages
from penstock.request import Done, InferRequest, Outcome

_log = logging.getLogger(__name__)


class Host:
    """The services of the host process. This implementation is for a model without a server. ``Worker`` overrides the methods. All
    methods are thread-safe.
    """

    def call(self, request: InferRequest, done: Done, decoupled: bool) -> Callable[[], None]:
        """Send ``request`` to another model. Returns a function that cancels the request.

        ``done`` receives the responses, and must not block.
        """
        raise Unsupported(f"model '{request.model_name}' cannot be called: there is no server in this process")

    def say(self, level: int, text: str) -> None:
        """Write a line to the server's log. ``level`` is a level of the module ``logging``."""
        _log.log(level, "%s", text)

    def measure(self, change: MetricChanged) -> None:
        """Update a metric of the model on the server's metrics page."""

    def later(self, call: Callable[[], object]) -> None:
        """Run ``call`` on another thread. For destructors, because they may run on a thread that holds a lock."""


class Here:
    """State of the only model in this process. The state is global, because models import their interface as a module."""

    def __init__(self) -> None:
        self.host = Host()
        self.name = ""
        self.folder = ""
        """Folder of the model's version."""
        self.measured: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        """Values of the model's metrics, by name and labels. The lock ``measuring`` guards them."""
        self.measuring = threading.Lock()
        self.waits_for_itself = False
        """True if the model would deadlock by calling itself from its main thread."""

    def ask(self, request: InferRequest, done: Done, decoupled: bool = False) -> Callable[[], None]:
        """Like ``Host.call``, but a call that would deadlock ends with the error ``Unavailable``."""
        itself = self.waits_for_itself and request.model_name == self.name
        if itself and threading.current_thread() is threading.main_thread():
            message = f"model '{self.name}' has one instance, which would wait for itself"
            done(Unavailable(message, "configure a second instance"))
            return lambda: None
        return self.host.call(request, done, decoupled)

    def wait_for(self, request: InferRequest) -> Outcome:
        """Send ``request`` to another model and wait for its answer."""
        replies: SimpleQueue[Outcome] = SimpleQueue()
        self.ask(request, replies.put)
        return replies.get()


here = Here()


class StageTimes:
    """Count and duration of a model's stages since the last ``take``. Any thread may use this class."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Stages = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            with self._lock:
                count, total_ns = self._totals.get(name, (0, 0))
                self._totals[name] = count + 1, total_ns + time.perf_counter_ns() - started_ns

    def take(self) -> Stages:
        with self._lock:
            totals, self._totals = self._totals, {}
        return totals
