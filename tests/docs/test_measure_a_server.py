"""The commands of ``docs/howto/measure-a-server.md`` run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import models
from processes import PATIENCE_S, ServerProcess

PAGE = Path(__file__).parents[2] / "docs/howto/measure-a-server.md"


def test_the_highest_rate_within_an_objective(tmp_path: Path) -> None:
    (tmp_path / "digits.onnx").write_bytes(models.linear().data)
    command = next(block for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) if "is_met" in block)
    command = "\n".join(line.removeprefix("   ") for line in command.splitlines())
    folder = Path(sys.executable).parent
    with ServerProcess(tmp_path / "digits.onnx") as server:
        short = command.replace("127.0.0.1:8000", "{}:{}".format(*server.address)).replace(
            "--duration 30", "--duration 0.2"
        )
        done = subprocess.run(
            ["bash", "-c", short],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=10 * PATIENCE_S,
            check=False,
        )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["500/s", "1000/s", "2000/s", "4000/s"], done.stderr
    assert {row[-1] for row in rows} <= {"met", "missed"}
