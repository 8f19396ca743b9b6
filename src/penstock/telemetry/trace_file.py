"""Traces as JSON files in Triton's format, for Triton's tools. A trace has two entries: its description and its timestamps.

    [{"id": 1, "model_name": "m", "model_version": 1, "request_id": "a"},
     {"id": 1, "timestamps": [{"name": "REQUEST_START", "ns": 2356425054587444}, …]}, …]

A file is a complete JSON document after every write, so that it can be read while the server runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BufferedRandom
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import InvalidConfig
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Trace

_END = b"\n]\n"


class TraceFile:
    """Writes traces to ``path``. If ``log_frequency`` of the global setting is N > 0, writes ``path.0``, ``path.1`` … with N traces
    per file.

    Existing files are overwritten. Only one thread may use an instance.
    """

    def __init__(self, path: Path, settings: TraceSettings) -> None:
        self._path = path
        self._settings = settings
        self._file: BufferedRandom | None = None
        self._traces = 0
        self._files = 0

    def check(self) -> None:
        """Raise InvalidConfig if the file's folder does not exist."""
        if not self._path.parent.is_dir():
            raise InvalidConfig(
                f"trace_file: the folder '{self._path.parent}' does not exist", "create it, or change trace_file"
            )

    def write(self, records: Sequence[Trace]) -> None:
        waiting = list(records)
        while waiting:
            frequency = self._settings.of("").log_frequency
            if frequency and self._traces >= frequency:
                self.close()
            room = frequency - self._traces if frequency else len(waiting)
            self._append(waiting[:room], numbered=bool(frequency))
            del waiting[:room]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._traces = None, 0

    def _append(self, records: Sequence[Trace], numbered: bool) -> None:
        entries = b",\n".join(msgspec.json.encode(entry) for record in records for entry in entries_of(record))
        if self._file is None:
            path = self._path.with_name(f"{self._path.name}.{self._files}") if numbered else self._path
            self._files += numbered
            self._file = path.open("w+b")
            self._file.write(b"[\n")
        else:
            self._file.seek(-len(_END), 2)
            self._file.write(b",\n")
        self._file.write(entries + _END)
        self._file.flush()
        self._traces += len(records)


def entries_of(trace: Trace) -> list[dict[str, Any]]:
    """The two entries of a trace. A request that did not run has no compute timestamps."""
    version: Any = (
        int(trace.model_version)
        if trace.model_version.isascii() and trace.model_version.isdecimal()
        else trace.model_version
    )
    about = {
        "id": trace.number,
        "model_name": trace.model_name,
        "model_version": version,
        "request_id": trace.request_id,
    }
    moments = [("REQUEST_START", trace.started_ns), ("QUEUE_START", trace.started_ns)]
    if trace.times is not None:
        moments += [
            ("COMPUTE_START", trace.times.taken_ns),
            ("COMPUTE_INPUT_END", trace.times.merged_ns),
            ("COMPUTE_OUTPUT_START", trace.times.ran_ns),
            ("COMPUTE_END", trace.times.split_ns),
        ]
    moments.append(("REQUEST_END", trace.ended_ns))
    return [about, {"id": trace.number, "timestamps": [{"name": name, "ns": ns} for name, ns in moments]}]
