"""Writes records on a separate thread, so that files and collectors never block the event loop."""

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
    """Destination of records. All its methods are called on the same thread."""

    def write(self, records: Sequence[_Written_contra]) -> None: ...

    def close(self) -> None: ...


class BackgroundWriter(Generic[_Record]):
    """Passes records to a sink, in order. While ``limit`` records are waiting, new records are dropped and counted.

    ``put`` is called only on the event loop's thread. ``stop`` closes the sink.
    """

    def __init__(self, name: str, sink: Sink[_Record], limit: int = 10_000) -> None:
        self.dropped = 0
        """Number of records that were lost because the limit was reached or the sink failed."""
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
        """Queue ``record``, or drop it. Never blocks, never raises."""
        if len(self._waiting) >= self._limit or self._stopping:
            self.dropped += 1
            return
        self._waiting.append(record)
        if not self._wake.is_set():
            self._wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Write the waiting records, close the sink and end the thread. Waits at most ``timeout_s`` seconds."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()  # cleared before the queue is read, so that later records set the event again
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
        except Exception as error:  # noqa: BLE001 - a full disk or a lost collector must not end the server
            self.dropped += len(records)
            if not self._failed:  # log only the first failure
                _log.warning("%s: records are being lost: %s", self._name, error)
            self._failed = True
