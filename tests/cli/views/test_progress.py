from __future__ import annotations

import re
import threading
from contextlib import redirect_stderr

import pytest

from penstock.cli.views.progress import StageProgress

PATIENCE_S = 60.0


class Log:
    """A stream that is not a terminal, as stderr in a CI job, and sets an event with each line."""

    def __init__(self) -> None:
        self.text = ""
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.text += text
        if text.endswith("\n"):
            self.written.set()
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def fail_in(*stages: str) -> None:
    with StageProgress() as progress:
        for stage in stages:
            progress(stage, 1, 4)
        raise RuntimeError("stopped")


def test_a_log_gets_a_line_of_each_stage_that_lasts() -> None:
    with redirect_stderr(log := Log()), StageProgress(every_s=0.001) as progress:
        for stage, done in (("quantize", 1), ("screen", 3)):
            progress(stage, done, 4)
            while stage not in log.text:
                assert log.written.wait(PATIENCE_S)
                log.written.clear()
    lines = log.text.splitlines()
    assert all(re.fullmatch(r" *\d+ s  (quantize 25%|screen 75%)", line) for line in lines)
    assert [line.split()[2] for line in (lines[0], lines[-1])] == ["quantize", "screen"]


def test_a_stage_with_many_steps_does_not_flood_the_log() -> None:
    with redirect_stderr(log := Log()), StageProgress(every_s=PATIENCE_S) as progress:
        for step in range(1000):
            progress("accuracy", step, 1000)
    assert log.text == ""


def test_what_ends_soon_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with StageProgress() as progress:
        progress("optimize", 0, 1)
        progress("pack", 0, 0)
    assert capsys.readouterr() == ("", "")


def test_a_failure_adds_nothing_to_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    for stages in ((), ("tune",), ("tune", "pack")):
        with pytest.raises(RuntimeError, match="stopped"):
            fail_in(*stages)
        assert capsys.readouterr().err == ""


def test_no_thread_is_left() -> None:
    with pytest.raises(RuntimeError, match="stopped"):
        fail_in("tune")
    assert all(thread.name != "progress" for thread in threading.enumerate())


def test_a_terminal_shows_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(RuntimeError, match="stopped"):
        fail_in("tune")
    shown = capsys.readouterr().err
    assert "tune" in shown
    assert "25%" in shown
    with StageProgress():
        pass
    assert capsys.readouterr().err == ""
