"""The Python of the compression pages and of the command reference runs as it is printed, in the order of each page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs" / "compression").glob("*.md")), ROOT / "docs" / "reference" / "cli.md"]
GOES_ON_FROM = {"mixed-precision": "sensitivity"}
"""Pages whose code continues the code of another page."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    before = GOES_ON_FROM.get(page.stem)
    text = (page.with_stem(before).read_text() if before else "") + page.read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert code
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
