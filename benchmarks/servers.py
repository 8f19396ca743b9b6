"""Starts servers on given cores, waits until they are ready, and makes sure that they stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.perf.http_client import Address

_READY_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 10
_MOST_SAID = 4000


class Server:
    """A running server: a process and its descendants."""

    def __init__(self, address: Address, pid: int, ready_s: float, grpc: Address | None = None) -> None:
        self.address = address
        self.grpc = grpc
        self.pid = pid
        self.ready_s = ready_s
        """Seconds from the start of the process to its line ``ready``."""

    def cpu_seconds(self) -> float:
        """CPU seconds that the server's processes have used so far."""
        fields = [_stat(pid) for pid in self.processes()]
        return sum(int(one[11]) + int(one[12]) for one in fields if one) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """The resident memory of all processes of the server. Shared memory counts for each process."""
        fields = [_stat(pid) for pid in self.processes()]
        return sum(int(one[21]) for one in fields if one) * os.sysconf("SC_PAGE_SIZE")

    def processes(self) -> list[int]:
        """The process and all its descendants."""
        parents = {pid: _stat(pid) for pid in _pids()}
        found = [self.pid]
        for pid in found:
            found += [child for child, fields in parents.items() if fields and int(fields[1]) == pid]
        return found


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the third field on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def split_cores() -> tuple[set[int], set[int]]:
    """A core for the server, and another core for the load. Both are the same if there is only one core."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[0]}, {cores[-1]}


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """Restrict this thread, and the processes that it starts, to ``cores``."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def penstock(target: Path, cores: set[int], *flags: str, **settings: object) -> Iterator[Server]:
    """Run ``penstock serve TARGET`` on free ports. ``settings`` are server settings by name."""
    environment = {f"PENSTOCK_SERVER_{name.upper()}": str(value) for name, value in settings.items()}
    arguments = ["-m", "penstock", "serve", str(target), "--http-port", "0", *flags]
    with serving(arguments, cores, environment=environment) as server:
        yield server


@contextmanager
def fastapi(model: Path, cores: set[int]) -> Iterator[Server]:
    """Run ``model`` with FastAPI, uvicorn and ONNX Runtime."""
    with serving(["-m", "benchmarks.peers.fastapi_app", str(model)], cores) as server:
        yield server


@contextmanager
def serving(
    arguments: Sequence[str],
    cores: set[int],
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run ``python`` with ``arguments``, a server that prints ``ready http=HOST:PORT``. Raises RuntimeError if it does not print
    this line.
    """
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        with pinned(cores):
            process = subprocess.Popen(
                [python, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # so that the server's descendants can be ended with it
            )
        try:
            found = _await_ready(process)
            if found is None:
                log.seek(0)
                said = log.read().decode(errors="replace")[-_MOST_SAID:]
                raise RuntimeError(f"{' '.join(arguments)} did not get ready:\n{said}")
            server = Server(found[0], process.pid, time.perf_counter() - start, found[1])
            # Some servers continue to print. Their output is discarded, because a full pipe would block them.
            threading.Thread(target=_drain, args=(process,), daemon=True).start()
            yield server
        finally:
            _stop(process)


def _await_ready(process: subprocess.Popen[str]) -> tuple[Address, Address | None] | None:
    """The HTTP and gRPC addresses in the line ``ready``. None if the process ends before this line, or is killed because it takes
    too long.
    """
    timer = threading.Timer(_READY_TIMEOUT_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.match(r"ready http=(\S+)(?: grpc=(\S+))?", line):
                return Address.parse(match[1]), Address.parse(match[2]) if match[2] else None
    finally:
        timer.cancel()
    return None


def _drain(process: subprocess.Popen[str]) -> None:
    with suppress(ValueError):  # closed
        for _ in process.stdout or ():
            pass


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _end_group(process.pid)
    if process.stdout is not None:
        process.stdout.close()


def _end_group(group: int) -> None:
    """Kill the processes that a server has left behind, and wait until they have ended."""
    end = time.monotonic() + _STOP_TIMEOUT_S
    with suppress(ProcessLookupError):  # no process is left
        while time.monotonic() < end and any(
            fields[:1] != ["Z"] and fields[2:3] == [str(group)] for fields in map(_stat, _pids())
        ):
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.01)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]
