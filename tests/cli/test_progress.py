from __future__ import annotations

import pytest

from penstock.cli.progress import StageProgress


def fail_in(*stages: str) -> None:
    with StageProgress() as progress:
        for stage in stages:
            progress(stage, 1, 4)
        raise RuntimeError("stopped")


def test_stages_are_named_on_stderr_when_they_are_done(capsys: pytest.CaptureFixture[str]) -> None:
    with StageProgress() as progress:
        progress("optimize", 0, 1)
        progress("optimize", 1, 1)
        assert not capsys.readouterr().err
        progress("tune", 1, 3)
        progress("pack", 0, 0)
    written = capsys.readouterr()
    assert written.out == ""
    assert [line.split()[:2] for line in written.err.splitlines()] == [
        [each, "done"] for each in ("optimize", "tune", "pack")
    ]


def test_a_failure_adds_nothing_to_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    for stages, lines in (((), 0), (("tune",), 0), (("tune", "pack"), 1)):
        with pytest.raises(RuntimeError, match="stopped"):
            fail_in(*stages)
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_a_terminal_shows_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(RuntimeError, match="stopped"):
        fail_in("tune")
    shown = capsys.readouterr().err
    assert "tune" in shown
    assert "25%" in shown
    assert "done" not in shown
    with StageProgress():
        pass
    assert capsys.readouterr().err == ""
