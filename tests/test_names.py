"""No two public classes of the package have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "penstock"

ALLOWED: dict[str, str] = {}
"""Names that may be defined twice, with the reason; at most five."""
PENDING: set[str] = {
    "Parts",
}
"""Names that are still to be made unique; none may be added."""


def definitions() -> dict[str, list[str]]:
    """For each public class name, the files that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(SOURCE).as_posix())
    return found


def test_no_public_class_name_is_defined_twice() -> None:
    twice = {name: files for name, files in definitions().items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in ALLOWED and name not in PENDING} == {}


def test_exceptions_are_few_and_needed() -> None:
    assert len(ALLOWED) <= 5
    assert [name for name in ALLOWED if len(definitions().get(name, ())) < 2] == []
