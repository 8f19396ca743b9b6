"""Error messages and help texts must not contain any of the words that are typical of unclear sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import errors

SOURCE = Path(__file__).parent.parent / "src" / "penstock"
WORDS = re.compile(
    r"\b(?:nobody|whoever|whatever|whichever|befalls?|befell|by hand|as far as|but for|(?:is|are|was|were) told|in hand|"
    r"(?:of|by) (?:its|their) own|comes? of|came of|lets? go of|as it was|makes? no sense|means? nothing|gives? back|"
    r"what (?:it|is|was|the|there) \w+ (?:is|are|was|were))\b",
    re.IGNORECASE,
)
MESSAGES = {name for name, kind in vars(errors).items() if isinstance(kind, type)} | {"Finding"}
"""What is called with a message and a hint."""


def text_of(node: ast.AST) -> str:
    """The constant text below ``node``, with an ellipsis for each formatted value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.FormattedValue):
        return "…"
    return "".join(text_of(child) for child in ast.iter_child_nodes(node))


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each message, hint and help text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            for argument in node.args if name in MESSAGES else ():
                yield argument.lineno, text_of(argument)
            for keyword in node.keywords:
                if keyword.arg in ("help", "hint", "message"):
                    yield keyword.value.lineno, text_of(keyword.value)


def offenders() -> list[str]:
    """The places of texts that contain a word of ``WORDS``."""
    return [
        f"{path.relative_to(SOURCE)}:{line}: {text}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in texts(ast.parse(path.read_text()))
        if WORDS.search(text)
    ]


@pytest.mark.parametrize(
    "source",
    [
        'raise InvalidModel(f"model {name} is told", "check it")',
        'raise InvalidModel("model", hint="given by hand")',
        'raise errors.NotFound("nobody " "knows")',
        'option = typer.Option(help="Read it as far as it goes.")',
    ],
)
def test_such_words_are_found(source: str) -> None:
    assert any(WORDS.search(text) for _, text in texts(ast.parse(source)))


def test_messages_and_help_have_no_such_words() -> None:
    assert offenders() == []
