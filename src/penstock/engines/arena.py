"""Returns unused memory of an ONNX Runtime session's arena to the system after large runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from penstock.clock import Clock, SystemClock

LARGE_BYTES = 1 << 20
"""A run is large if its inputs and outputs have at least this many bytes."""
TRIM_S = (5.0, 10.0, 20.0, 80.0)
"""The arena is trimmed this many seconds after the last large run. Later trims release the memory of responses that are read
late."""


class ArenaTrimmer:
    """Trims an arena some seconds after the last large run. Its thread starts at the first large run and ends after the last trim.

    An arena keeps the memory of the largest batch, because allocating it again would make a run up to 50 % longer. The arena is
    therefore not trimmed while large runs follow one another. ``trim`` may block while the system reclaims the memory. Other runs
    of the session may have to wait meanwhile.
    """

    def __init__(
        self,
        trim: Callable[[], object],
        clock: Clock | None = None,
        start: Callable[[ArenaTrimmer], object] | None = None,
    ) -> None:
        """``trim`` must not refer to the trimmer. Such a reference cycle would delay the release of a dropped model's memory.

        ``start`` starts a loop that calls ``next_wait``. By default, the loop runs on a new thread.
        """
        self._trim = trim
        self._clock = clock or SystemClock()
        self._start = start or _start_thread
        self._lock = threading.Lock()
        self._last = 0.0  # the end of the last large run
        self._trims = 0  # since then
        self.woken = threading.Event()
        """Set to end the current wait early and call ``next_wait`` again."""
        self.is_closed = False
        self._is_watched = False

    def note_large(self) -> None:
        """Record that a large run has ended. Any thread may call this."""
        with self._lock:
            is_later = self._trims > 0  # the wait for the next trim is longer than that for the first one
            self._last, self._trims = self._clock.now(), 0
            if self._is_watched or self.is_closed:
                if is_later:
                    self.woken.set()
                return
            self._is_watched = True
        self._start(self)

    def next_wait(self) -> float | None:
        """Trim the arena if a trim is due. Returns the seconds to wait before the next call, or None if no trim is pending."""
        with self._lock:
            waited = self._clock.now() - self._last
            if waited < TRIM_S[self._trims]:
                return TRIM_S[self._trims] - waited
            self._trims += 1
            is_last = self._trims == len(TRIM_S)
            self._is_watched = not is_last
        self._trim()
        return None if is_last else self.next_wait()

    def close(self) -> None:
        """Trim no more."""
        self.is_closed = True
        self.woken.set()


def _start_thread(trimmer: ArenaTrimmer) -> None:
    threading.Thread(target=_watch, args=(weakref.ref(trimmer), trimmer.woken), name="arena", daemon=True).start()


def _watch(weak: weakref.ref[ArenaTrimmer], woken: threading.Event) -> None:
    wait: float | None = 0.0
    while wait is not None:
        woken.wait(wait)
        woken.clear()
        trimmer = weak()
        wait = None if trimmer is None or trimmer.is_closed else trimmer.next_wait()
        del trimmer
