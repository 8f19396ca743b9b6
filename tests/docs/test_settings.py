"""The tables of settings in the reference pages match the fields of ``ServerConfig``."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
SCRIPT = runpy.run_path(str(DOCS / "settings.py"))


@pytest.mark.parametrize("name", ["configuration.md", "cli.md"])
def test_the_tables_are_up_to_date(name: str) -> None:
    page = (DOCS / "reference" / name).read_text()
    assert SCRIPT["refreshed"](page, SCRIPT["tables"]()[name]) == page, "run: python docs/settings.py"


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(SystemExit, match="no markers"):
        SCRIPT["refreshed"]("# Page", "table")
