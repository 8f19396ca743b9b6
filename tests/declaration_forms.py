"""Declarations as text in all forms that are read, declarations with mistakes, and what the parser and the JSON Schema say."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema_rs
import msgspec
import yaml

from penstock.errors import InvalidConfig
from penstock.pipeline.check import checked
from penstock.pipeline.declaration import Declaration, all_steps, options_as, parse
from penstock.pipeline.presence import check_presence
from penstock.pipeline.schema import schema
from penstock.pipeline.source import Located, Path, SourceText, read_json, read_source
from penstock.pipeline.steps.registry import step_class
from pipeline_parts import catalogue
from random_pipelines import RESOURCES

_VALIDATOR = jsonschema_rs.Draft202012Validator(schema())
_SAMPLES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -5,
        2.5,
        10**12,
        "",
        "x",
        "a b",
        "v1",
        "rgb",
        "pillow",
        "n" * 101,
        "x" * 10_001,
        [],
        ["v1"],
    ),
    *(
        ["v1", "a b"],
        [1],
        [1, 2],
        [1.5, 2.5, 3.5],
        [[1]],
        {},
        {"value": "v1"},
        {"value": 1},
        {"a b": "v2"},
        {"media": "text"},
    ),
    *({"step": "softmax", "in": "x", "out": "y"}, [{"step": "softmax", "in": "x", "out": "y"}]),
)
"""No float is whole: JSON Schema takes 1.0 for an integer, and the parser does not."""
_KEYS = (
    *(
        "step",
        "model",
        "map",
        "python",
        "in",
        "out",
        "name",
        "when",
        "as",
        "steps",
        "description",
        "colour",
        "batch",
        "size",
    ),
    *("k", "media", "shape", "datatype", "axis", "value", "labels", "x", "a b"),
)


def check_forms(data: dict[str, Any]) -> Declaration | None:
    """The declaration ``data``, or None if it is refused.

    Raises AssertionError unless all texts of it, and the canonical form, give the same or are refused with their line, and unless the
    schema agrees.
    """
    told = {name: _read(read_source(text.encode(), name)) for name, text in texts(data)}
    first = told["block.yaml"]
    if isinstance(first, InvalidConfig):
        for name, one in told.items():
            assert isinstance(one, InvalidConfig), f"{name} is accepted, but block.yaml is refused: {first}"
            assert re.match(rf"{name}, line \d+: ", one.message), f"no line: {one}"
            assert _reason(one) == _reason(first), f"{one}, not {first}"
    else:
        canonical = msgspec.json.encode(first.to_data())
        for name, one in (*told.items(), ("pipeline.json", _read(read_json(canonical, "pipeline.json")))):
            assert isinstance(one, Declaration), f"{name} is refused, but block.yaml is accepted: {one}"
            assert msgspec.json.encode(one.to_data()) == canonical, f"{name} is another declaration"
    refusal = str(first) if isinstance(first, InvalidConfig) else _wrong_options(first)
    mistakes = [str(error) for error in _VALIDATOR.iter_errors(data)]
    assert bool(refusal) == bool(mistakes), f"the parser says {refusal or 'yes'!r}, and the schema {mistakes or 'yes'}"
    return None if isinstance(first, InvalidConfig) else first


def check_meaning(declaration: Declaration) -> str:
    """Why ``declaration`` is refused, apart from its form; empty if it is not. Raises AssertionError if the line is missing."""
    try:
        check_presence(declaration, checked(declaration, catalogue().traits, RESOURCES))
    except InvalidConfig as error:
        reason = str(error)
    else:
        return ""
    assert re.match(r"[\w.]+, line \d+: ", reason), f"no line: {reason}"
    return reason


def _read(source: SourceText) -> Declaration | InvalidConfig:
    try:
        return parse(source)
    except InvalidConfig as error:
        return error


def _reason(error: InvalidConfig) -> str:
    """The text of ``error`` without its place, and without the advice for TOML."""
    hint = error.hint.partition("; in TOML")[0]
    return f"{error.message.partition(': ')[2]} ({hint})"


def _wrong_options(declaration: Declaration) -> str:
    """The first error about the form of a standard step, which the parser leaves to the check."""
    for step in all_steps(declaration.steps):
        if step.kind == "step":
            try:
                options_as(declaration.source, step.path, "step", step.options, step_class(step.target))
            except Located as error:
                return str(error)
            except InvalidConfig as error:
                if "there is no step" in error.message:
                    return str(error)  # otherwise, a step refuses a combination of options
    return ""


def mistaken(random: Random, data: dict[str, Any]) -> dict[str, Any]:
    """``data`` with one or two keys or values dropped, renamed, added or replaced."""
    data = copy.deepcopy(data)
    for _ in range(random.choice((1, 1, 2))):
        paths = [path for path in _places(data) if path]
        if not paths:
            break
        at: Any = data
        *above, key = random.choice(paths)
        for step in above:
            at = at[step]
        match random.randrange(5):
            case 0:
                del at[key]
            case 1:
                at[key] = copy.deepcopy(random.choice(_SAMPLES))
            case 2 if isinstance(at, dict):
                at[random.choice(_KEYS)] = at.pop(key)
            case 3 if isinstance(at, dict):
                at[random.choice(_KEYS)] = copy.deepcopy(random.choice(_SAMPLES))
            case 4 if isinstance(at, list):
                at.append(copy.deepcopy(random.choice(_SAMPLES)))
    return data


def _places(data: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from _places(value, (*path, key))


_DUMPER = type("_Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
"""Writes no aliases."""


def texts(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The name of a file and its text, for YAML in three styles, and TOML."""
    style: dict[str, Any] = {"Dumper": _DUMPER, "sort_keys": False, "allow_unicode": True}
    yield "block.yaml", yaml.dump(data, **style)
    yield "flow.yaml", yaml.dump(data, **style, default_flow_style=True, width=40)
    yield "json.yaml", json.dumps(data, ensure_ascii=False, indent=1)
    if not _has_null(data):
        yield "pipeline.toml", toml(data)


def toml(data: dict[str, Any]) -> str:
    """``data`` as TOML: short values first, then a table for each input and each step."""
    lines = [f"{_key(name)} = {_inline(value)}" for name, value in data.items() if name not in ("inputs", "steps")]
    inputs = data.get("inputs")
    if not isinstance(inputs, dict) or not inputs or not all(isinstance(one, dict) for one in inputs.values()):
        lines += [f"inputs = {_inline(inputs)}"] if "inputs" in data else []
        inputs = {}
    steps = data.get("steps")
    if not isinstance(steps, list) or not steps or not all(isinstance(one, dict) for one in steps):
        lines += [f"steps = {_inline(steps)}"] if "steps" in data else []
        steps = []
    for name, one in inputs.items():
        lines += ["", f"[inputs.{_key(name)}]", *(f"{_key(key)} = {_inline(value)}" for key, value in one.items())]
    for step in steps:
        lines += ["", "[[steps]]", *(f"{_key(key)} = {_inline(value)}" for key, value in step.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_inline(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return _key(value) if isinstance(value, str) else json.dumps(value)


def _has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_null, value.values()))
    return any(map(_has_null, value)) if isinstance(value, list) else value is None
