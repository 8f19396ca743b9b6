"""Real peers as processes of their own: "start this program on a free port, wait until it answers, stop it".

    with RealProcess(["redis-server", "--port", "{port}", "--save", ""]) as redis:
        client = Redis(port=redis.port)

Tests that use this carry the marker ``real``; where the program is not installed they skip.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import pytest

PATIENCE_S = 30

_PACKAGES = {
    "nghttp": "nghttp2-client",
    "h2load": "nghttp2-client",
    "promtool": "prometheus",
    "redis-cli": "redis-tools",
}
_ATTEMPTS = 3


def require(program: str) -> str:
    """The path of ``program``; skips the test where it is not installed."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed: apt-get install {_PACKAGES.get(program, program)}")
    return path


def run(program: str, *arguments: str | Path, input: bytes | str | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run ``program`` to its end and return what it wrote; skips where it is not installed."""
    given = input.encode() if isinstance(input, str) else input
    return subprocess.run(
        [require(program), *map(str, arguments)], input=given, capture_output=True, timeout=PATIENCE_S, check=False
    )


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(port: int) -> bool:
    """Whether something accepts connections on ``port`` of the loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


class RealProcess:
    """``command`` with ``{port}`` replaced by a free port and ``{folder}`` by an empty folder of its own, which is removed afterwards.

    Entering returns when ``is_ready(port)``, by default when it accepts connections; leaving stops it.
    """

    def __init__(self, command: Sequence[str | Path], is_ready: Callable[[int], bool] = answers) -> None:
        self._program = require(str(command[0]))
        self._arguments = [str(argument) for argument in command[1:]]
        self._is_ready = is_ready

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        for _ in range(_ATTEMPTS):  # somebody else may take the port between our asking for it and the program's
            self.port = free_port()
            if self._start():
                return self
        output = self.output()
        self._folder.cleanup()
        raise AssertionError(f"{self._program} did not start:\n{output}")

    def __exit__(self, *exc: object) -> None:
        self._stop()
        self._folder.cleanup()

    def output(self) -> str:
        """What it has written to stdout and stderr so far."""
        return (self.folder / "output").read_text(errors="replace")

    def _start(self) -> bool:
        arguments = [
            each.replace("{port}", str(self.port)).replace("{folder}", str(self.folder)) for each in self._arguments
        ]
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [self._program, *arguments], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < end:
            if self._is_ready(self.port):
                return self.process.poll() is None
            time.sleep(0.02)  # nothing tells when a foreign program is ready
        self._stop()
        return False

    def _stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
