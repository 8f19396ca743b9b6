"""Check that the target of every relative link and anchor in the documents exists, and that every ``penstock`` command line is valid.

Run by ``make docs``. All ``*.md`` files of the repository are checked. Links to other sites are not followed. In fenced
blocks marked ``sh`` or ``console``, a line that begins with ``penstock`` must use a known command and known long options.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import typer.main

from penstock.cli.flags.triton_flags import FLAGS
from penstock.cli.main import COMMANDS, make_app

ROOT = Path(__file__).resolve().parent.parent

_SKIPPED = {"build", "demo", "dist", "node_modules"}
_FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*(\w*)")
_CODE = re.compile(r"(`+)(?:(?!\n\n).)*?\1", re.DOTALL)
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^\s)>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)>?", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$")
_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_SHELL = {"sh", "bash", "console"}
_ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "2>", "<", "2>&1"}


def documents(root: Path) -> list[Path]:
    """All Markdown files below ``root``, except in hidden folders and build outputs."""
    return [
        path
        for path in sorted(root.rglob("*.md"))
        if not any(part.startswith(".") or part in _SKIPPED for part in path.relative_to(root).parts[:-1])
    ]


def links(text: str) -> Iterator[tuple[int, str]]:
    """``(line number, target)`` of every link to this repository, outside fenced blocks and code spans."""
    lines = [""] * (text.count("\n") + 1)
    for number, line, language in _lines(text):
        lines[number - 1] = line if language is None else ""
    prose = _CODE.sub(lambda code: "\n" * code[0].count("\n"), "\n".join(lines))
    for pattern in (_LINK, _REFERENCE):
        for match in pattern.finditer(prose):
            if not _ELSEWHERE.match(match[1]):
                yield prose.count("\n", 0, match.start()) + 1, match[1]


def commands(text: str) -> Iterator[tuple[int, str]]:
    """``(line number, command)`` for each ``penstock`` line of the shell blocks, continuation lines joined."""
    begun, parts = 0, ""
    for number, line, language in _lines(text):
        if language not in _SHELL:
            continue
        stripped = line.strip().removeprefix("$ ")
        if parts or stripped.startswith("penstock "):
            begun, parts = begun or number, f"{parts} {stripped.removesuffix(chr(92))}"
            if not stripped.endswith("\\"):
                yield begun, parts.strip()
                begun, parts = 0, ""


def link_fault(document: Path, target: str) -> str:
    """The fault of a relative link; empty if its target exists."""
    path, _, anchor = target.partition("#")
    aim = (document.parent / path).resolve() if path else document
    if not aim.exists():
        return f"link to '{target}': there is no such file"
    if anchor and aim.suffix == ".md" and anchor not in anchors(aim):
        return f"link to '{target}': {aim.name} has no such heading"
    return ""


@cache
def anchors(document: Path) -> frozenset[str]:
    """The anchors that GitHub makes from a document's headings, and the explicit anchors."""
    found: list[str] = []
    for _, line, language in _lines(document.read_text(encoding="utf-8")):
        found += _ANCHOR.findall(line)
        heading = _HEADING.match(line) if language is None else None
        if heading:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            repeats = sum(1 for anchor in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", anchor))
            found.append(f"{slug}-{repeats}" if repeats else slug)
    return frozenset(found)


def command_fault(command: str) -> str:
    """The fault of a command line; empty if the command and its long options exist."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError as error:
        return f"'{command}' cannot be read: {error}"
    words = words[1 : next((at for at, word in enumerate(words) if word in _ENDS), None)]
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        return f"there is no command 'penstock {name}'"
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in options(name):
            return f"'penstock {name or ''}' has no option '{option}'"
    return ""


@cache
def options(command: str | None) -> frozenset[str]:
    """The options of ``command``, or of ``penstock`` itself."""
    group = typer.main.get_command(make_app(command))
    found = getattr(group, "commands")[command] if command else group  # noqa: B009 - typer's own type hides it
    flags = {f"--{flag}" for flag in FLAGS} if command == "tritonserver" else set()
    return frozenset(name for parameter in found.params for name in parameter.opts) | {"--help", *flags}


def check(root: Path) -> tuple[list[str], int, int]:
    """``(faults, documents, links)``: the faults of all documents as ``file:line: fault``, and the numbers of documents and links
    checked."""
    faults: list[str] = []
    count = 0
    paths = documents(root)
    for path in paths:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(root)
        for number, target in links(text):
            count += 1
            faults += [f"{name}:{number}: {fault}"] if (fault := link_fault(path, target)) else []
        faults += [f"{name}:{number}: {fault}" for number, line in commands(text) if (fault := command_fault(line))]
    return faults, len(paths), count


def main() -> int:
    """Print every fault, or a summary if there is none."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="repository to check; default: this one")
    faults, documents_seen, links_seen = check(parser.parse_args().root.resolve())
    print("\n".join(faults) or f"{documents_seen} documents, {links_seen} links: all targets exist")
    return 1 if faults else 0


def _lines(text: str) -> Iterator[tuple[int, str, str | None]]:
    """``(number, line, language)`` of each line except fences: the language of the surrounding fenced block, None outside blocks."""
    fence, language = "", None
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if match and not fence:
            fence, language = match[1], match[2]
        elif match and match[1].startswith(fence) and not match[2]:
            fence, language = "", None
        else:
            yield number, line, language


if __name__ == "__main__":
    sys.exit(main())
