"""Fuzzing in processes: what they say, and what is kept of one that a signal ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.campaign import TARGETS
from tests.fuzz.corpus import Corpus
from tests.fuzz.spread import LastMessage, _epitaph, spread


def test_targets_share_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert spread(["raw_tensor", "queue"], 0.01, 5, 1, tmp_path)
    written = capsys.readouterr().out
    assert "2 targets, 0 s each, 1 at a time, seed 5" in written
    assert "100 %" in written
    assert "found nothing" in written


def test_the_last_message_of_a_process_that_crashes_is_kept(tmp_path: Path) -> None:
    write = LastMessage(tmp_path / "last").writer()
    write(b"the first, longer message")
    write(b"deadly")
    text = _epitaph("queue", -signal.SIGSEGV, tmp_path, tmp_path / "last")
    assert Corpus("queue", tmp_path).messages() == [b"deadly"]
    assert "signal 11" in text
    assert "python -m tests.fuzz queue --replay " in text
    assert not _epitaph("queue", 1, tmp_path, tmp_path / "last")


def test_each_target_loads_from_the_command_line() -> None:
    command, folder = [sys.executable, "-m", "tests.fuzz", "--runs", "0"], Path(__file__).parents[2]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert run.returncode == 0, run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines()] == list(TARGETS)
