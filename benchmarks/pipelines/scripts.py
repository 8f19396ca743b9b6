"""Runs the scripts of ``examples/``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def script(path: str) -> Iterator[dict[str, Any]]:
    """The names of the script ``path`` below ``examples/``. The modules of its folder can be imported within the context."""
    before, folder = set(sys.modules), str((EXAMPLES / path).parent)
    sys.path.insert(0, folder)
    try:
        yield runpy.run_path(str(EXAMPLES / path))
    finally:
        sys.path.remove(folder)
        for name in sys.modules.keys() - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]
