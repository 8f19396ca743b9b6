"""The output in ``docs/howto/look-at-a-model.md`` is that of the command."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from commands import penstock

__all__ = ["penstock"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/look-at-a-model.md"
VARIES = ("memory", "engine")
"""Lines that depend on the installed engines."""


def stable(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(VARIES)]


def test_the_page_shows_what_the_command_prints(penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(
        r"^penstock inspect model.onnx\n```\n\n```\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    shutil.copyfile(ROOT / "examples/digits/model.onnx", tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    done = penstock("inspect", "model.onnx")
    assert done.code == 0, done.err
    assert stable(done.out) == stable(found[1])
