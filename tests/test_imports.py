"""No imports of the package form a cycle, including imports for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """The modules of the package that ``tree`` imports, at any level."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found.update(within or {node.module})
    return found & modules


def graph() -> dict[str, set[str]]:
    paths = {module_name(path): path for path in SOURCE.rglob("*.py")}
    return {name: imported(ast.parse(path.read_text()), set(paths)) - {name} for name, path in paths.items()}


def circles(edges: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """The groups of modules that import one another (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []

    def visit(node: str) -> Iterator[set[str]]:
        index[node] = lowest[node] = len(index)
        path.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                yield from visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in path:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            group = set(path[path.index(node) :])
            del path[path.index(node) :]
            if len(group) > 1:
                yield group

    for node in sorted(edges):
        if node not in index:
            yield from visit(node)


def test_a_circle_is_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert list(circles(edges)) == [{"a", "b", "c"}]


def test_no_module_imports_itself_in_a_circle() -> None:
    assert [sorted(group) for group in circles(graph())] == []
