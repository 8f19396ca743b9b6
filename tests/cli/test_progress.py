from __future__ import annotations

import pytest

from penstock.cli.progress import StageProgress


def test_stages_are_drawn_on_stderr_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    with StageProgress() as progress:
        progress("optimize", 0, 1)
        progress("tune", 1, 3)
        progress("pack", 0, 0)
    written = capsys.readouterr()
    assert written.out == ""
    lines = written.err.splitlines()
    assert [line.split()[0] for line in lines] == ["optimize", "tune", "pack"]
    # A stage is done when the next one starts, and all are when the work is.
    assert all("100%" in line for line in lines)


def test_a_failure_leaves_the_bar_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with StageProgress() as progress:
            progress("tune", 1, 4)
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        work()
    assert " 25%" in capsys.readouterr().err
