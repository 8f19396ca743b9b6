"""Write the reference of the standard steps, from their classes.

Run ``python docs/steps.py`` after a step has changed; ``tests/docs/test_steps.py`` fails while the page is out of date.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from penstock.config import field_docs, settings
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.registry import NAMES, step_class

TARGET = Path(__file__).resolve().parent / "reference" / "steps.md"
GROUPS = {"image": "Pictures", "boxes": "Boxes", "scores": "Scores", "text": "Text", "audio": "Sound"}
"""Heading of the steps in each folder. Other steps come first."""
INTRODUCTION = """\
# Steps of pipelines

These are the standard steps of a pipeline. A step works on the values of one item, without a batch axis: a picture is an array
[height, width, channels] of UINT8, and a file is its content. Steps with an option `like` reproduce the library that it names, and
tests compare them with it.

`python docs/steps.py` writes this page from the classes of the steps.
"""


def page() -> str:
    """The page."""
    groups: dict[str, list[str]] = {"": [], **{folder: [] for folder in GROUPS}}
    for name in NAMES:
        folder = step_class(name).__module__.removeprefix("penstock.pipeline.steps.").partition(".")[0]
        groups[folder if folder in GROUPS else ""].append(name)
    parts = [INTRODUCTION]
    for folder, names in groups.items():
        if names:
            parts += [f"## {GROUPS.get(folder, 'General')}", *(section(name, step_class(name)) for name in names)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def section(name: str, step: type[Step]) -> str:
    """The text on one step."""
    lines = [f"### {name}", "", plain(inspect.getdoc(step) or ""), ""]
    reads = (f"`{value}`" + (" (optional)" if value in step.optional else "") for value in step.inputs)
    returns = (f"`{value}`" for value in step.outputs)
    lines.append(f"Reads {listed(reads)}; returns {listed(returns)}.")
    helps, bounds = field_docs(step), {setting.name: setting.bounds for setting in settings_of(step)}
    fields = msgspec.structs.fields(step)
    if fields:
        lines += ["", "| Option | Values | Default | |", "|---|---|---|---|"]
    for field in fields:
        is_needed = field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
        default = "required" if is_needed else shown(field.default)
        values = kind_of(field.type) + (f", {bounds[field.name]}" if bounds.get(field.name) else "")
        lines.append(f"| `{field.encode_name}` | {values} | {default} | {plain(helps.get(field.name, ''))} |")
    return "\n".join(lines)


def settings_of(step: type[Step]) -> Iterable[Any]:
    """The options of ``step`` with their bounds."""
    return settings(step) if field_docs(step).keys() >= set(step.__struct_fields__) else ()


def kind_of(kind: Any) -> str:
    """The type of an option in words."""
    if get_origin(kind) is Annotated:
        return kind_of(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind) if value != "")
    if get_origin(kind) is tuple:
        *parts, last = get_args(kind)
        return (
            f"list of {kind_of(parts[0]).replace('number', 'numbers')}"
            if last is Ellipsis
            else f"{len(parts) + 1} × {kind_of(last)}"
        )
    if parts := [part for part in get_args(kind) if part is not NoneType]:
        return " or ".join(kind_of(part) for part in parts)
    return {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}.get(kind, str(kind))


def shown(default: Any) -> str:
    """A default as it would be declared."""
    if default is None or default in ("", ()):
        return "none"
    if isinstance(default, float):
        return "1/255" if default == 1 / 255 else f"`{default:g}`"
    return f"`{msgspec.json.encode(default).decode()}`".replace('"', "")


def plain(text: str) -> str:
    """A docstring as Markdown."""
    return text.replace("``", "`")


def listed(names: Iterator[str]) -> str:
    """Names in a row, or that there are none."""
    return ", ".join(names) or "no value"


if __name__ == "__main__":
    TARGET.write_text(page())
