"""Runs the attackers in a separate process, and makes sure that it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from benchmarks.servers import Server

ATTACKERS = 16
_OVERTIME_S = 90.0


class Outcome(msgspec.Struct, frozen=True):
    """The counts and the CPU time of the attackers."""

    cpu_s: float
    counts: dict[str, int]

    def __str__(self) -> str:
        shown = {name: number for name, number in self.counts.items() if name != "bytes sent"}
        sent = self.counts.get("bytes sent", 0) / 2**20
        return ", ".join([f"{sent:,.0f} MiB sent", *(f"{number:,} {name}" for name, number in shown.items())])


class Attackers:
    """A running attack."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def finish(self, seconds: float) -> Outcome:
        """Wait for the end of an attack that takes ``seconds``. Raises RuntimeError if it failed."""
        # The few lines fit into the pipe. ``communicate`` would lose those that ``readline`` has already buffered.
        if self._process.wait(seconds + _OVERTIME_S):
            raise RuntimeError(f"the attack failed with exit code {self._process.returncode}")
        assert self._process.stdout is not None
        return msgspec.json.decode(self._process.stdout.read().splitlines()[-1], type=Outcome)


@contextmanager
def attacking(
    name: str, server: Server, seconds: float, attackers: int = ATTACKERS, key: str = ""
) -> Iterator[Attackers]:
    """Attack ``server``. The body runs once the attackers have sent their first bytes. Raises RuntimeError if the attack does not
    start.
    """
    assert server.grpc is not None
    arguments = [name, "--http", server.address.authority, "--grpc", server.grpc.authority, "--key", key]
    arguments += ["--seconds", str(seconds), "--attackers", str(attackers)]
    command = [sys.executable, "-m", "benchmarks.attacks", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "attacking\n":
            raise RuntimeError(f"the attack {name} did not start")
        yield Attackers(process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
