"""The reference pages are complete: options, settings, errors, statuses, public names."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import typer.main

import penstock
from penstock import errors
from penstock.artifact import SUFFIXES, TITLES
from penstock.cli.main import _EXIT_CODES, COMMANDS, make_app
from penstock.config import write_text
from penstock.offline.build import Recipe
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.metric_table import METRICS
from penstock.offline.optimize.passes import default_passes
from penstock.online.server.config import ServerConfig
from penstock.online.server.status import HTTP
from penstock.protocol.messages import ModelConfig

DOCS = Path(__file__).parent.parent.parent / "docs"


def rows(page: str, heading: str = "") -> dict[str, list[str]]:
    """The tables of a page, or of its section ``heading``: first column without marks -> the other cells."""
    text = (DOCS / page).read_text()
    if heading:
        text = re.split(rf"^#+ {heading}$", text, flags=re.MULTILINE)[1]
        text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
    lines = [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("|--")
    ]
    return {re.sub(r"[`├└│ ]", "", cells[0]): [cell.strip("` ") for cell in cells[1:]] for cells in lines}


def options_of(command: str) -> set[str]:
    found = typer.main.get_command(make_app(command)).commands[command]
    shown = [parameter for parameter in found.params if not getattr(parameter, "hidden", False)]
    return {name for parameter in shown for name in parameter.opts if name.startswith("--")} - {"--json"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_every_command(command: str) -> None:
    options = options_of(command)
    if command == "config":  # its section refers to that of serve
        assert options == options_of("serve") - {"--ops"}  # it is no setting
        return
    shown = {
        option
        for cell in rows("reference/cli.md", f"penstock {command}")
        for option in re.findall(r"--[a-z][\w-]*", cell)
    }
    assert shown - {"--json"} == options


@pytest.mark.parametrize(
    ("page", "struct"),
    [
        ("reference/configuration.md", ServerConfig),
        ("reference/python.md", Recipe),
        ("reference/python.md", Contract),
    ],
)
def test_every_field(page: str, struct: type[msgspec.Struct]) -> None:
    assert {field.name for field in msgspec.structs.fields(struct)} <= set(rows(page))


def test_every_format() -> None:
    shown = rows("reference/engines.md")
    for format, title in TITLES.items():
        (file, *_) = shown[title.replace(" ", "")]
        assert all(suffix in file for suffix, other in SUFFIXES.items() if other is format)


def test_every_metric() -> None:
    shown = {
        name
        for cell in rows("concepts/accuracy-metrics.md", "The metrics")
        for name in re.findall(r"[a-z][\w:-]+", cell)
    }
    assert shown - {"--metric", "metric", "module:function"} == set(METRICS)


def test_every_field_of_a_model_configuration() -> None:
    page = (DOCS / "reference" / "model-configuration.md").read_text()
    assert [field.name for field in ModelConfig.DESCRIPTOR.fields if f"`{field.name}`" not in page] == []


def test_defaults_of_the_server() -> None:
    shown = rows("reference/configuration.md")
    for field in msgspec.structs.fields(ServerConfig):
        assert shown[field.name][0] == (write_text(field.default) or "none")


def test_every_error_with_its_code_status_and_exit_code() -> None:
    tree = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    shown = rows("reference/errors.md")
    for kind in tree:
        code, _, status, exit_code = shown[kind.__name__]
        assert (code, status, exit_code) == (
            kind.code.value,
            str(HTTP[kind.code]),
            str(_EXIT_CODES.get(kind.code, 1)),
        )


def test_every_public_name() -> None:
    page = (DOCS / "reference" / "python.md").read_text()
    assert [name for name in penstock.__all__ if f"`{name}" not in page] == []


def test_every_pass_in_its_order() -> None:
    shown = [name for name in rows("concepts/life-of-a-model.md", "The passes") if "_" in name]
    assert shown == [each.name for each in default_passes()]
