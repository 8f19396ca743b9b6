"""A declaration as text, in all forms that are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def texts(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The name of a file and its text, for YAML in three styles, and TOML."""
    style: dict[str, Any] = {"Dumper": _Dumper, "sort_keys": False, "allow_unicode": True}
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
