"""``penstock help``: show a page of the documentation. The pages are the files below ``docs``, which the package contains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markdown import Markdown

import penstock
from penstock.cli import options
from penstock.cli.main import COMMANDS, make_app
from penstock.cli.views.tables import make_console, print_table
from penstock.config import did_you_mean
from penstock.errors import NotFound

FOLDERS = ("tutorial", "howto", "concepts", "compression", "convert", "reference")
"""The folders of the documentation that the package contains."""
_OTHER_NAMES = {
    "accuracy": "accuracy-and-latency",
    "bundle": "bundle-format",
    "certificate": "convert",
    "contract": "accuracy-and-latency#The contract",
    "data": "calibrate",
    "parity": "convert",
    "repository": "model-repository",
}
"""Short names of topics: the page, and perhaps one of its sections. A page of the same name has precedence."""
_MARKS = re.compile(r"(```.*?```|`[^`]*`)|(!?)\[([^]]*)\]\(([^)]*)\)", re.DOTALL)
"""Code, which stays as it is, or an image or link."""


class Topic(msgspec.Struct, frozen=True):
    """One topic: a page of the documentation, or one section of a page."""

    name: str
    path: Path
    section: str = ""

    @property
    def title(self) -> str:
        """The first heading."""
        return self.text.partition("\n")[0].lstrip("# ")

    @property
    def text(self) -> str:
        """The page or section as Markdown."""
        page = self.path.read_text(encoding="utf-8")
        if not self.section:
            return page
        found = re.search(rf"^## {re.escape(self.section)}$.*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
        assert found is not None, self.section
        return found[0]


def topics() -> dict[str, Topic]:
    """All topics by name. Raises NotFound if the documentation is not installed."""
    pages = [path for folder in FOLDERS for path in sorted((_documentation() / folder).glob("*.md"))]
    named = {path.parent.name if path.stem == "README" else path.stem: path for path in pages}
    found = {name: Topic(name, path) for name, path in named.items()}
    for name, target in _OTHER_NAMES.items():
        page, _, section = target.partition("#")
        found.setdefault(name, Topic(name, found[page].path, section))
    return found


def _complete(incomplete: str) -> list[str]:
    return [name for name in sorted({*topics(), *COMMANDS}) if name.startswith(incomplete)]


def help(
    topic: Annotated[
        str | None,
        typer.Argument(
            help="A topic or a command. Without it, all topics are listed.",
            show_default=False,
            autocompletion=_complete,
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Explain a topic, such as data, accuracy or contract, with a page of the documentation. For a command, show its --help.

    [bold]Examples[/bold]

      penstock help

      penstock help contract

      penstock help data | less
    """
    known = topics()
    if topic is None:
        _list(known, json)
    elif topic in known:
        _show(known[topic], known, json)
    elif topic in COMMANDS:
        make_app(topic)([topic, "--help"], prog_name="penstock")
    else:
        raise NotFound(f"there is no help on '{topic}'", _hint(topic, known))


def _list(known: dict[str, Topic], json: bool) -> None:
    if json:
        facts = [{"name": topic.name, "title": topic.title} for topic in known.values()]
        print(msgspec.json.encode({"topics": facts}).decode())
        return
    by_name = sorted(known.values(), key=lambda topic: topic.name)
    print_table(make_console(), ("topic", "title"), [(topic.name, topic.title) for topic in by_name], texts=("title",))


def _show(topic: Topic, known: dict[str, Topic], json: bool) -> None:
    if json:
        print(msgspec.json.encode({"topic": topic.name, "title": topic.title, "text": topic.text}).decode())
        return
    text = readable(topic, known)
    console = make_console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text, end="")


def readable(topic: Topic, known: dict[str, Topic]) -> str:
    """The text of ``topic`` for a terminal: without images, and with the linked topics in a last line instead of links."""
    names = {other.path: other.name for other in reversed(known.values()) if not other.section}
    linked: dict[str, None] = {}

    def replace(mark: re.Match[str]) -> str:
        code, image, text, target = mark.groups()
        if code:
            return code
        path = (topic.path.parent / target.partition("#")[0]).resolve()
        if path in names and path != topic.path:
            linked[names[path]] = None
        return "" if image else text

    text = _MARKS.sub(replace, topic.text).strip()
    also = [f"`penstock help {name}`" for name in linked]
    also += [f"`penstock {topic.name} --help`"] if topic.name in COMMANDS else []
    return f"{text}\n" + (f"\nSee also: {', '.join(also)}\n" if also else "")


def _documentation() -> Path:
    """The folder of the documentation: in the installed package or, in a checkout, beside ``src``."""
    package = Path(penstock.__file__).resolve().parent
    for folder in (package / "docs", package.parents[1] / "docs"):
        if folder.is_dir():
            return folder
    raise NotFound("the documentation is not installed", "install Penstock from its wheel or a checkout")


def _hint(word: str, known: dict[str, Topic]) -> str:
    near = did_you_mean(word, [*known, *COMMANDS])
    return near if near.startswith("did you mean") else "`penstock help` lists all topics"
