"""Access log: one JSON line per request with client, model, sizes, status and times. It never contains tensors, headers or keys."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from penstock.telemetry.tracing import Trace

STDOUT = "-"


class AccessLog:
    """Appends to the file ``target``, or to stdout if ``target`` is ``-``. Only one thread may use it.

    Creates the file again after log rotation has renamed or removed it. Raises OSError if the file cannot be opened.
    """

    def __init__(self, target: str) -> None:
        self._path = None if target == STDOUT else Path(target)
        self._file: BinaryIO = sys.stdout.buffer if self._path is None else self._open(self._path)

    def write(self, records: Sequence[Trace]) -> None:
        if self._path is not None and not self._is_in_place(self._path):
            self._file.close()
            self._file = self._open(self._path)
        offset_ns = time.time_ns() - time.monotonic_ns()
        self._file.write(b"".join(encode(line_of(record, offset_ns)) for record in records))
        self._file.flush()

    def close(self) -> None:
        if self._path is not None:
            self._file.close()

    def _open(self, path: Path) -> BinaryIO:
        # Not world-readable, because the log shows which client uses which model.
        return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640), "wb")

    def _is_in_place(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def encode(line: dict[str, Any]) -> bytes:
    """``line`` as one line of JSON in printable ASCII, because it contains text from clients and terminals may display it."""
    text = msgspec.json.encode(line)
    if not text.isascii():
        text = json.dumps(line, separators=(",", ":")).encode()
    return text.replace(b"\x7f", b"\\u007f") + b"\n"


def line_of(trace: Trace, offset_ns: int) -> dict[str, Any]:
    """The line of ``trace``. ``offset_ns`` is epoch minus monotonic time. ``compute_us`` is the compute time of the whole batch."""
    times = trace.times
    moment = datetime.fromtimestamp((trace.ended_ns + offset_ns) / 1e9, UTC)
    return {
        "time": moment.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "client": trace.client,
        "model": trace.model_name,
        "version": trace.model_version,
        "request_id": trace.request_id,
        "status": trace.status,
        "bytes_in": trace.bytes_in,
        "bytes_out": trace.bytes_out,
        "duration_us": (trace.ended_ns - trace.started_ns) // 1000,
        "queue_us": (times.taken_ns - trace.started_ns) // 1000 if times else 0,
        "compute_us": (times.split_ns - times.taken_ns) // 1000 if times else 0,
        "batch_rows": trace.batch_rows,
        "trace_id": trace.context.trace_id if trace.context else "",
    }
