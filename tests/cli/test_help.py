from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import Command
from penstock.cli.help import Topic, readable, topics
from penstock.cli.main import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"
PROMISED = ["accuracy", "bundle", "contract", "data", "engines", "repository"]


def test_the_list_has_every_page_and_the_short_names(penstock: Command) -> None:
    done = penstock("help")
    assert done.code == 0
    listed = {line.split()[0] for line in done.out.splitlines()[1:]}
    pages = [path for folder in ("concepts", "howto", "reference", "tutorial") for path in (DOCS / folder).glob("*.md")]
    assert {*PROMISED, *(path.stem for path in pages)} <= listed
    assert {topic["name"] for topic in penstock("help", "--json").json["topics"]} == listed


def test_no_page_hides_another() -> None:
    stems = [path.stem for path in DOCS.glob("*/*.md")]
    assert len(set(stems)) == len(stems)


@pytest.mark.parametrize("name", topics())
def test_a_topic_is_shown_as_its_page_without_links(penstock: Command, name: str) -> None:
    done = penstock("help", name)
    topic = topics()[name]
    assert done.code == 0
    assert done.out.startswith(topic.text.splitlines()[0])
    assert topic.title in done.out
    prose = re.sub(r"```.*?```|`[^`]*`", "", done.out, flags=re.DOTALL)
    assert "](" not in prose
    for also in re.findall(r"`penstock help ([\w-]+)`", done.out.rpartition("See also")[2]):
        assert also in topics()
    # Nothing else is lost.
    words = re.findall(r"\w+", re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", topic.text))
    assert set(words) - set(re.findall(r"\w+", done.out)) <= set(re.findall(r"\w+", " ".join(_images(topic))))
    assert penstock("help", name, "--json").json["text"] == topic.text


def _images(topic: Topic) -> list[str]:
    return re.findall(r"!\[([^]]*)\]", topic.text)


def test_the_contract_is_one_section() -> None:
    contract = topics()["contract"]
    assert contract.title == "The contract"
    assert contract.text.count("\n## ") == 0
    assert contract.text in topics()["accuracy"].text


def test_links_become_a_last_line_and_code_stays(tmp_path: Path) -> None:
    text = (
        "# A\n\n![picture](a.svg)\nSee [the\nother](b.md#x), [self](a.md), [web](http://x.y) and `[code](b.md)`.\n\n"
        "```\n[f](b.md)\n```\n"
    )
    (tmp_path / "a.md").write_text(text)
    (tmp_path / "b.md").write_text("# B\n")
    known = {name: Topic(name, tmp_path / f"{name}.md") for name in ("a", "b")}
    assert readable(known["a"], known) == (
        "# A\n\n\nSee the\nother, self, web and `[code](b.md)`.\n\n```\n[f](b.md)\n```\n\nSee also: `penstock help b`\n"
    )


def test_a_terminal_gets_a_rendered_page(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    shown = re.sub(r"\x1b\[[\d;]*m", "", penstock("help", "contract").out)
    assert "## The contract" not in shown
    assert "The contract" in shown
    assert max(map(len, shown.splitlines())) <= 70


def test_a_command_shows_its_own_help(penstock: Command) -> None:
    assert penstock("help", "build").out == penstock("build", "--help").out
    assert "penstock doctor --help" in penstock("help", "doctor").out  # also a page
    assert "build" in COMMANDS


def test_an_unknown_topic_is_guessed(penstock: Command) -> None:
    done = penstock("help", "acuracy")
    assert done.code == 3
    assert done.err == "error: there is no help on 'acuracy'\n  fix: did you mean 'accuracy'?\n"
    assert "`penstock help` lists all topics" in penstock("help", "xyzzy").err
