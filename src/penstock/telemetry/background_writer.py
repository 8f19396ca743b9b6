"""Records written by a thread of their own, so that no file and no collector ever keeps the event loop waiting."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

_log = logging.getLogger(__name__)

_Record = TypeVar("_Record")
_Written_contra = TypeVar("_Written_contra", contravariant=True)

_BATCH = 1000


class Sink(Protocol[_Written_contra]):
    """Where records go; called by one thread only."""

    def write(self, records: Sequence[_Written_contra]) -> None: ...

    def close(self) -> None: ...


class BackgroundWriter(Generic[_Record]):
    """Hands records to a sink, in order. What comes while ``limit`` are waiting is dropped and counted.

    ``put`` belongs to one thread, the event loop's. The sink is closed by ``stop``.
    """

    def __init__(self, name: str, sink: Sink[_Record], limit: int = 10_000) -> None:
        self.dropped = 0
        """Records that came too fast, or that the sink failed to write."""
        self._name = name
        self._sink = sink
        self._limit = limit
        self._waiting: deque[_Record] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, record: _Record) -> None:
        """Take ``record``, or drop it; never waits, never raises."""
        if len(self._waiting) >= self._limit or self._stopping:
            self.dropped += 1
            return
        self._waiting.append(record)
        if not self._wake.is_set():
            self._wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Write what waits, close the sink and end the thread; gives up after ``timeout_s``."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()  # before looking: what comes from now on sets it again
            while self._waiting:
                self._write([self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))])
            if self._stopping:
                break
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - as in _write
            _log.warning("%s: %s", self._name, error)

    def _write(self, records: Sequence[_Record]) -> None:
        try:
            self._sink.write(records)
            self._failed = False
        except Exception as error:  # noqa: BLE001 - a full disk or a collector that is gone must not end the server
            self.dropped += len(records)
            if not self._failed:  # said once, not once a batch
                _log.warning("%s: records are being lost: %s", self._name, error)
            self._failed = True
