"""The picture of the rooms matches the contracts that import-linter enforces."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree as ET

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "architecture.py"))
SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_up_to_date() -> None:
    assert SCRIPT["PICTURE"].read_text() == SCRIPT["picture"](), "run: python docs/architecture.py"


def test_every_room_is_drawn_inside_the_picture() -> None:
    root = ET.fromstring(SCRIPT["picture"]())
    drawn = {text.text for text in root.iter(f"{SVG}text")}
    package = DOCS.parent / "src" / "penstock"
    rooms = {path.stem for path in package.iterdir() if not path.name.startswith(("__", "py."))}
    rooms |= {path.stem for path in (package / "online").iterdir() if not path.name.startswith("__")}
    assert rooms <= drawn
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= float(root.get("width", 0))
        assert float(box.get("y", 0)) + float(box.get("height", 0)) <= float(root.get("height", 0))
