"""The supervisor. It runs in a separate process, because it forks."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from penstock.online.server.processes.supervisor import reserve

PATIENCE_S = 30

SCRIPT = """
import os, resource, select, signal, sys, threading
from penstock.errors import EngineUnavailable, InvalidModel, PenstockError
from penstock.online.server.processes.supervisor import Supervisor

mode, count = sys.argv[1], int(sys.argv[2])

def serve(place, ready):
    # With only a handler, a signal that arrives just before select() waits would be noticed too late.
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write)
    say("start", place.index, os.getpid())
    if mode == "refuses" and place.index == 1:
        raise InvalidModel("no such operator", "another model")
    if mode == "lacks" and place.index == 1:
        raise EngineUnavailable("openvino", "penstock[openvino]")
    if mode == "foreign" and place.index == 1:
        raise type("OfAnEngine", (PenstockError,), {})("it broke")
    if mode == "dies" and place.index == 1:
        os._exit(7)
    if mode == "never" and place.index == 1:
        select.select([read], [], [])
        return
    ready({"first": place.index})
    patience = 2 if mode == "stubborn" else 1
    found = [read]
    while patience and place.lifeline not in found:
        found = select.select([read, place.lifeline], [], [])[0]
        for _ in os.read(read, patience) if read in found else b"":
            say("told", place.index)
            patience -= 1
    say("orphan" if place.lifeline in found else "stop", place.index, os.getpid())
    if mode == "bad end" and place.index == 1:
        sys.exit(3)

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def on_ready(found):
    say("ready", *found)
    if mode == "cannot fork":
        # A pipe takes two file descriptors.
        most = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

try:
    Supervisor(count, serve, on_ready).run()
except PenstockError as error:
    say("error", type(error).__name__, error)
"""


class Supervised:
    """The script, and its output."""

    def __init__(self, mode: str = "", count: int = 2) -> None:
        command = [sys.executable, "-c", SCRIPT, mode, str(count)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)

    def lines(self, what: str, count: int) -> list[list[str]]:
        """The next ``count`` lines that begin with ``what``, split into words; other lines are skipped."""
        found: list[list[str]] = []
        assert self.process.stdout
        while len(found) < count:
            line = self.process.stdout.readline()
            assert line, "it has ended"
            if line.startswith(what):
                found.append(line.split())
        return found

    def pids(self) -> dict[int, int]:
        """The ids of the processes that start next, by index, once all are ready."""
        pids = {int(index): int(pid) for _, index, pid in self.lines("start", 2)}
        self.lines("ready", 1)
        return pids

    def end(self) -> tuple[str, str]:
        """The remaining output except lines with "told", and stderr."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0
        return "".join(line for line in out.splitlines(keepends=True) if not line.startswith("told")), err


@pytest.fixture
def supervised() -> Iterator[Supervised]:
    with Supervised() as process:
        yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_start_once_are_ready_together_and_end_together(supervised: Supervised, number: signal.Signals) -> None:
    pids = supervised.pids()
    assert sorted(pids) == [0, 1]
    supervised.process.send_signal(number)
    out, err = supervised.end()
    assert sorted(out.splitlines()) == sorted(f"stop {index} {pid}" for index, pid in pids.items())
    assert err == ""


def test_one_that_dies_is_started_again_at_once_and_then_later(supervised: Supervised) -> None:
    pids = supervised.pids()
    for _ in range(2):
        os.kill(pids[1], signal.SIGKILL)
        (_, index, pid), *_ = supervised.lines("start", 1)
        assert (index, int(pid) != pids[1]) == ("1", True)
        pids[1] = int(pid)
    supervised.process.send_signal(signal.SIGTERM)
    out, err = supervised.end()
    assert sorted(out.splitlines()) == sorted(f"stop {index} {pid}" for index, pid in pids.items())
    assert err.splitlines() == [f"process 1 ended with signal 9; it restarts in {delay} s" for delay in ("0", "0.5")]


def test_it_ends_while_one_is_not_there(supervised: Supervised) -> None:
    pids = supervised.pids()
    for _ in range(3):
        os.kill(pids[1], signal.SIGKILL)
        pids[1] = int(supervised.lines("start", 1)[0][2])
    os.kill(pids[1], signal.SIGKILL)
    assert supervised.process.stderr
    while "restarts in 2 s" not in supervised.process.stderr.readline():
        pass
    supervised.process.send_signal(signal.SIGTERM)
    out, _ = supervised.end()
    assert out == f"stop 0 {pids[0]}\n"


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("refuses", "InvalidModel no such operator (another model)"),
        ("lacks", r"Unavailable engine 'openvino' is not available (pip install 'penstock[openvino]')"),
        ("foreign", "PenstockError it broke"),
        ("dies", "Unavailable a server process ended with code 7 before it was ready"),
    ],
)
def test_what_keeps_one_from_starting_ends_all(mode: str, error: str) -> None:
    with Supervised(mode) as supervised:
        out, _ = supervised.end()
    *before, last = out.splitlines()
    assert last == f"error {error}"
    assert not any(line.startswith("ready") for line in before)


def test_it_can_be_ended_before_it_is_ready() -> None:
    with Supervised("never") as supervised:
        supervised.lines("start", 2)
        supervised.process.send_signal(signal.SIGTERM)
        out, _ = supervised.end()
    assert "ready" not in out
    assert "error" not in out


def test_however_early_it_is_ended_nothing_stays() -> None:
    for _ in range(5):
        with Supervised(count=8) as supervised:
            (_, _, pid), *_ = supervised.lines("start", 1)
            supervised.process.send_signal(signal.SIGTERM)
            out, _ = supervised.end()
        assert "error" not in out
        assert not Path(f"/proc/{pid}").exists()


def test_one_that_ends_badly_is_told_at_the_end() -> None:
    with Supervised("bad end") as supervised:
        supervised.pids()
        supervised.process.send_signal(signal.SIGTERM)
        out, _ = supervised.end()
    assert "error Unavailable a server process ended with code 3" in out


def test_a_second_signal_is_passed_on_to_all() -> None:
    with Supervised("stubborn") as supervised:
        supervised.pids()
        for number in (signal.SIGTERM, signal.SIGINT):
            supervised.process.send_signal(number)
            supervised.lines("told", 2)
        assert supervised.end()[1] == ""


def test_they_learn_that_the_supervisor_is_gone(supervised: Supervised) -> None:
    pids = supervised.pids()
    ends = [os.pidfd_open(pid) for pid in pids.values()]
    supervised.process.kill()
    told = supervised.lines("orphan", 2)
    assert {int(pid) for _, _, pid in told} == set(pids.values())
    for end in ends:
        assert select.select([end], [], [], PATIENCE_S)[0]
        os.close(end)


def test_one_that_cannot_be_started_again_is_tried_later() -> None:
    with Supervised("cannot fork") as supervised:
        pids = supervised.pids()
        os.kill(pids[1], signal.SIGKILL)
        assert supervised.process.stderr
        for how in (r"ended with signal 9; .* 0 s", r"could not be started \(.*\); .* 0.5 s"):
            assert re.search(how, supervised.process.stderr.readline())
        hard = resource.prlimit(supervised.process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(supervised.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        supervised.lines("start", 1)
        supervised.process.send_signal(signal.SIGTERM)
        supervised.end()


def test_a_reserved_port_is_for_those_who_share_it() -> None:
    with reserve("127.0.0.1", 0) as held:
        address = held.getsockname()
        with socket.socket() as alone, pytest.raises(OSError, match="in use"):
            alone.bind(address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 1)
        servers = [socket.create_server(address, reuse_port=True) for _ in range(2)]
        with pytest.raises(OSError, match="in use"):
            reserve(*address)
        for server in servers:
            server.close()
