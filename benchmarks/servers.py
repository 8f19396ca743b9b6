"""Servers to measure: started on given cores, awaited, and surely stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.perf.http_client import Address

_READY_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 10


class Server:
    """A running server process."""

    def __init__(self, address: Address, pid: int, ready_s: float) -> None:
        self.address = address
        self.pid = pid
        self.ready_s = ready_s
        """Seconds from the start of the process to its line ``ready``."""

    def cpu_seconds(self) -> float:
        """CPU time that the process has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def split_cores() -> tuple[set[int], set[int]]:
    """A core for the server and one for the load; the same one if there is no other."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[0]}, {cores[-1]}


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """Run this thread, and the processes that it starts, on ``cores`` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def penstock(target: Path, cores: set[int], *flags: str) -> Iterator[Server]:
    """``penstock serve TARGET``."""
    with serving(["-m", "penstock", "serve", str(target), "--http-port", "0", *flags], cores) as server:
        yield server


@contextmanager
def fastapi(model: Path, cores: set[int]) -> Iterator[Server]:
    """FastAPI + uvicorn + ONNX Runtime."""
    with serving(["-m", "benchmarks.peers.fastapi_app", str(model)], cores) as server:
        yield server


@contextmanager
def serving(arguments: Sequence[str], cores: set[int]) -> Iterator[Server]:
    """Python with ``arguments``, a server that prints ``ready http=HOST:PORT``. Raises RuntimeError if it does not."""
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        with pinned(cores):
            process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            address = _await_ready(process)
            if address is None:
                log.seek(0)
                raise RuntimeError(f"{' '.join(arguments)} did not get ready:\n{log.read().decode(errors='replace')}")
            yield Server(address, process.pid, time.perf_counter() - start)
        finally:
            _stop(process)


def _await_ready(process: subprocess.Popen[str]) -> Address | None:
    """The address in the line ``ready``; None if the process ends, or is ended for taking too long, before it."""
    timer = threading.Timer(_READY_TIMEOUT_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.match(r"ready http=(\S+)", line):
                return Address.parse(match[1])
    finally:
        timer.cancel()
    return None


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
