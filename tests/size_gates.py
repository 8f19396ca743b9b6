"""Size gates: a file or function that outgrows its limit fails the build, so that structure is mended while it is cheap."""

import ast
import sys
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 60
SOURCE_LINES = 54_000

SOURCE = Path(__file__).parent.parent / "src"


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def main() -> int:
    """Print every violation; their number decides the exit code."""
    violations, total = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        lines = text.count("\n")
        total += lines
        if lines > FILE_LINES:
            violations.append(f"{path}: {lines} lines, the limit is {FILE_LINES}")
        violations += [
            f"{path}:{node.lineno}: {node.name} has {body_lines(node)} lines, the limit is {FUNCTION_LINES}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > FUNCTION_LINES
        ]
    if total > SOURCE_LINES:
        violations.append(f"src has {total} lines, the budget is {SOURCE_LINES}")
    print("\n".join(violations) or f"sizes are within the gates: {total} lines in src")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
