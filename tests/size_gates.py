"""Size gates: a file, function, folder or room that outgrows its limit fails the build, while mending the structure is cheap."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 60
FOLDER_FILES = 15

SOURCE = Path(__file__).parent.parent / "src" / "penstock"
SPLIT = ("offline", "online")
"""Folders whose folders are rooms of their own."""
ROOM_LINES = {
    "": 2_450,
    "bundle": 2_887,
    "cli": 4_525,
    "engines": 2_780,
    "inputs": 1_106,
    "offline": 1_420,
    "offline/compress": 18_041,
    "offline/convert": 16_140,
    "offloading": 746,
    "offline/judge": 2_610,
    "offline/look": 1_145,
    "offline/optimize": 2_425,
    "offline/tune": 786,
    "online": 56,
    "online/cache": 841,
    "online/instances": 3_176,
    "online/repository": 5_291,
    "online/scheduler": 3_050,
    "online/server": 15_986,
    "perf": 2_985,
    "pipeline": 8_582,
    "protocol": 472,
    "rows": 2_227,
    "runtime": 560,
    "samples": 1_750,
    "storage": 409,
    "telemetry": 1_976,
}
"""Budget of each room, in lines: a folder below the package, and the package's own files. A new room needs a new row."""
WIDE_FOLDERS: dict[str, int] = {}
"""Folders that still hold more files than they may."""


def room_of(path: Path) -> str:
    """The room of a source file, by its path below the package."""
    depth = 2 if path.parts[0] in SPLIT else 1
    return "/".join(path.parts[:-1][:depth])


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def check_files(sources: Mapping[Path, str]) -> Iterator[str]:
    """Files and functions that are too long."""
    for path, text in sources.items():
        if (lines := text.count("\n")) > FILE_LINES:
            yield f"{path}: {lines} lines, the limit is {FILE_LINES}"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {body_lines(node)} lines, the limit is {FUNCTION_LINES}"


def check_folders(sources: Mapping[Path, str]) -> Iterator[str]:
    """Folders with too many files, ``__init__.py`` not counted."""
    counts = Counter(path.parent.as_posix() for path in sources if path.name != "__init__.py")
    for folder, count in counts.items():
        if count > (limit := WIDE_FOLDERS.get(folder, FOLDER_FILES)):
            yield f"{folder}: {count} files, the limit is {limit}"


def check_rooms(sources: Mapping[Path, str]) -> Iterator[str]:
    """Rooms over their budget."""
    lines: Counter[str] = Counter()
    for path, text in sources.items():
        lines[room_of(path)] += text.count("\n")
    for room, count in lines.items():
        if room not in ROOM_LINES:
            yield f"{room}: a room without a budget; give it one in ROOM_LINES"
        elif count > ROOM_LINES[room]:
            yield f"{room or 'top level'}: {count} lines, the budget is {ROOM_LINES[room]}"


def main() -> int:
    """Print every violation; their number decides the exit code."""
    sources = {path.relative_to(SOURCE): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    violations = [*check_files(sources), *check_folders(sources), *check_rooms(sources)]
    total = sum(text.count("\n") for text in sources.values())
    print("\n".join(violations) or f"sizes are within the gates: {total} lines in src")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
