"""Options: structs whose fields declare their bounds, their help, and their form on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, Self, get_args, get_origin, get_type_hints

import msgspec

from penstock.config import did_you_mean, plain_type
from penstock.errors import InvalidConfig


class Usage(msgspec.Struct, frozen=True, eq=False):
    """The form of an option on the command line, and its relation to other options. It is part of the field's annotation."""

    text: Literal["", "share", "seconds", "file"] = ""
    """How the value is written: ``share`` for 5%, ``seconds`` for 20s, ``file`` for a path; empty for the default form of its type."""
    needs: Mapping[str, tuple[str, ...]] = {}
    """Other options that this option requires, with their allowed values. An empty tuple allows any true value."""
    excludes: tuple[str, ...] = ()
    """Options that cannot be combined with this option."""
    writes: Literal["", "picture", "report", "coded model"] = ""
    """The kind of file that the method writes here. An existing file is replaced only if it is of the same kind."""
    default: str = ""
    """The default shown in help, if it differs from the field's default."""
    hidden: bool = False
    """True if the option exists only in Python, not on the command line."""


Share = Annotated[float, msgspec.Meta(gt=0, le=1), Usage("share")]
Part = Annotated[float, msgspec.Meta(ge=0, le=1), Usage("share")]
"""A fraction that may be 0."""
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seed = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
File = Annotated[str, Usage("file")]

_BOUNDS = {">": "greater than", ">=": "at least", "<": "less than", "<=": "at most"}
Spell = Callable[[str], str]
"""Formats the name of an option for error messages."""


class Options(msgspec.Struct, frozen=True):
    """Base of options with checks."""

    def check(self, spell: Spell = str) -> None:
        """Raise InvalidConfig if a field, or a field of nested options, violates its annotation."""
        try:
            msgspec.convert(msgspec.to_builtins(self), type(self))
        except msgspec.ValidationError as error:
            expected, _, path = str(error).partition(" - at `$.")
            name = path.rstrip("`")
            got = f", got {_shown(self, name, attrgetter(name)(self))}" if name.replace(".", "_").isidentifier() else ""
            message = f"{spell(name)} must be {self._wanted(name, expected)}{got}"
            raise InvalidConfig(message, f"change or remove {spell(name)}") from None

    def _wanted(self, name: str, expected: str) -> str:
        """The requirement on ``name`` as text, made from ``expected``, the text in msgspec's error."""
        if bound := re.search(r"([<>]=?) (\S+)$", expected):
            return f"{_BOUNDS[bound[1]]} {_shown(self, name, float(bound[2]))}"
        kind = next((plain_type(field.type) for field in msgspec.structs.fields(self) if field.name == name), None)
        if get_origin(kind) is Literal:
            return f"one of {', '.join(map(str, get_args(kind)))}"
        return f"of another type: {expected[:1].lower()}{expected[1:]}"

    @classmethod
    def make(cls, given: Mapping[str, Any], spell: Spell = str) -> Self:
        """Checked options with the values ``given``. Raises InvalidConfig; ``spell`` formats the names of options."""
        fields = msgspec.structs.fields(cls)
        known = {field.name: field for field in fields}
        for name in given:
            if name not in known:
                raise InvalidConfig(f"unknown option '{name}'", did_you_mean(name, known))
        if missing := [field.name for field in fields if field.required and field.name not in given]:
            raise InvalidConfig(f"{spell(missing[0])} is required")
        options = cls(**given)
        options.check(spell)
        used = usages(cls)
        asked = [name for name, value in given.items() if value is not None and (value or known[name].default)]
        for name in asked:
            options._check_together(name, used[name], asked, spell)
        return options

    def _check_together(self, name: str, usage: Usage, given: list[str], spell: Spell) -> None:
        for other, values in usage.needs.items():
            value = getattr(self, other)
            if not (value in values if values else value):
                wanted = f"{spell(other)} {' or '.join(values)}".rstrip()
                raise InvalidConfig(f"{spell(name)} requires {wanted}", f"add {wanted}, or remove {spell(name)}")
        for other in usage.excludes:
            if other in given:
                raise InvalidConfig(f"{spell(name)} cannot be combined with {spell(other)}", "remove one of them")


def usages(options: type[msgspec.Struct]) -> dict[str, Usage]:
    """The ``Usage`` of each field, with defaults if the annotation has none."""
    hints = get_type_hints(options, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(options):
        merged: dict[str, Any] = {}
        for part in _annotations(hints[field.name]):
            if isinstance(part, Usage):
                merged |= {name: value for name, value in msgspec.structs.asdict(part).items() if value}
        found[field.name] = Usage(**merged)
    return found


def option_name(field: str, default: object = None) -> str:
    """The name of ``field`` on the command line: ``--per-layer``, or ``--no-heads`` if the default is True."""
    return f"--{'no-' if default is True else ''}{field.removesuffix('_s').replace('_', '-')}"


def _annotations(hint: Any) -> list[Any]:
    """All metadata of an annotation, outermost last, including the members of a union."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        return [*_annotations(inner), *more]
    return [part for argument in get_args(hint) for part in _annotations(argument)]


def _shown(options: msgspec.Struct, name: str, value: object) -> str:
    if isinstance(value, float) and "." not in name and usages(type(options))[name].text == "share":
        return f"{100 * value:g}%"
    return f"{value:g}" if isinstance(value, float) else repr(value)
