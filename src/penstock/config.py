"""Configuration: declares settings, merges their sources, and records the origin of each value.

A configuration is a frozen ``msgspec.Struct`` next to the code that it configures; each field has a type, a default and a docstring.
The sources are, in ascending precedence: the defaults, a TOML file, the environment (``PENSTOCK_<SECTION>_<FIELD>``), command-line
flags, and ``--set name=value``.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import msgspec

from penstock.errors import InvalidConfig, NotFound

_Config = TypeVar("_Config", bound=msgspec.Struct)
_Value = TypeVar("_Value")

Flag = Annotated[_Value, "flag"]
"""Type of a field that has a separate command-line option. All other fields are set with ``--set``."""
Secret = Annotated[_Value, "secret"]
"""Type of a field whose value is never shown."""

_TEXT_ORIGINS = ("environment", "--set")


class Setting(msgspec.Struct, frozen=True):
    """One field of a configuration, as presented in command-line help and documentation."""

    name: str
    kind: Any
    """The field's type, without bounds and without None."""
    bounds: str
    """The bounds as text, e.g. ``1 to 1024``; empty if the field has none."""
    default: Any
    help: str
    is_flag: bool
    is_secret: bool


class Resolved(msgspec.Struct, Generic[_Config], frozen=True):
    """A configuration with the origin of each field: ``default``, ``file``, ``environment NAME``, ``flag`` or ``--set``."""

    config: _Config
    origins: dict[str, str]

    def explain(self) -> list[tuple[str, Any, str]]:
        """``(field, effective value, origin)`` for every field, in declared order."""
        return [(name, getattr(self.config, name), origin) for name, origin in self.origins.items()]


def settings(of: type[msgspec.Struct]) -> list[Setting]:
    """Describe every field of a configuration, in declared order."""
    help_texts = field_docs(of)
    return [
        Setting(
            field.name,
            plain_type(field.type),
            _bounds(field.type),
            field.default,
            help_texts[field.name],
            is_flag="flag" in getattr(field.type, "__metadata__", ()),
            is_secret="secret" in getattr(field.type, "__metadata__", ()),
        )
        for field in msgspec.structs.fields(of)
    ]


def field_docs(of: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring of each documented field of ``of`` and its base classes, as one line."""
    found: dict[str, str] = {}
    for kind in reversed(of.__mro__):
        if issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct:
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
            assert isinstance(tree, ast.ClassDef)
            found |= {
                field.target.id: " ".join(text.value.value.split())
                for field, text in pairwise(tree.body)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            }
    return found


def resolve(
    into: type[_Config],
    section: str,
    file: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
    path: Path | None = None,
) -> Resolved[_Config]:
    """Merge the sources of ``section`` into a configuration. Raises InvalidConfig.

    A flag with value None counts as absent. The class attribute ``REMOVED`` of ``into`` maps removed settings to reasons.
    ``assignments`` are the arguments ``name=value`` of ``--set``; repeated assignments to a list append items. ``path`` is the path of
    ``file``, for error messages.
    """
    kinds = {field.name: field.type for field in msgspec.structs.fields(into)}
    removed: Mapping[str, str] = getattr(into, "REMOVED", {})
    prefix = f"PENSTOCK_{section.upper()}_"
    values: dict[str, Any] = {}
    origins = dict.fromkeys(kinds, "default")
    for origin, shown, key, given in _given(prefix, file or {}, environment or {}, flags or {}, assignments):
        if key not in kinds:
            place = _place(origin, path)
            if key in removed:
                raise InvalidConfig(f"setting '{shown}' in {place} was removed: {removed[key]}", "remove it")
            raise InvalidConfig(f"unknown setting '{shown}' in {place}", did_you_mean(key, kinds))
        value = _convert(kinds[key], key, given, origin, path)
        if origin == origins[key] == "--set" and isinstance(value, tuple):
            value = (*values[key], *value)
        values[key] = value
        origins[key] = f"environment {shown}" if origin == "environment" else origin
    try:
        return Resolved(into(**values), origins)
    except ValueError as error:
        raise InvalidConfig(f"bad {section} configuration: {error}") from None


def read_file(path: Path, sections: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file by section name. Raises NotFound, and InvalidConfig for a syntax error or an unknown section."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"no configuration file '{path}'") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"configuration file '{path}' is not valid TOML: {error}") from None
    except OSError as error:
        raise InvalidConfig(f"cannot read configuration file '{path}': {error.strerror}") from None
    known = list(sections)
    for name, table in tables.items():
        if name not in known:
            raise InvalidConfig(f"unknown section '{name}' in '{path}'", did_you_mean(name, known))
        if not isinstance(table, dict):
            raise InvalidConfig(f"'{name}' in '{path}' must be a table", f"write its settings below [{name}]")
    return tables


def read_text(kind: Any, text: str) -> Any:
    """Convert ``text`` to the type ``kind``: ``8000``, ``true``; lists as ``a,b`` or as a JSON array. Raises MsgspecError."""
    if get_origin(plain_type(kind)) is not tuple:
        return msgspec.convert(text, kind, strict=False)
    if text.lstrip().startswith("["):  # a JSON array, for items that contain commas
        return msgspec.json.decode(text, type=kind)
    return msgspec.convert([part.strip() for part in text.split(",") if part.strip()], kind, strict=False)


def write_text(value: Any) -> str:
    """Format ``value`` so that ``read_text`` reads it back; empty for None."""
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def plain_type(kind: Any) -> Any:
    """The type in ``kind``, without ``Annotated`` and ``None``."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    parts = [part for part in get_args(kind) if part is not NoneType]
    return plain_type(parts[0]) if NoneType in get_args(kind) and len(parts) == 1 else kind


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint with the known word that is most similar to ``word``, or with all known words."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean '{near[0]}'?" if near else f"use one of: {', '.join(names)}"


def _given(
    prefix: str,
    file: Mapping[str, Any],
    environment: Mapping[str, str],
    flags: Mapping[str, Any],
    assignments: Sequence[str],
) -> Iterator[tuple[str, str, str, Any]]:
    """One tuple per setting, in ascending precedence: its origin, its name as the user wrote it, its field name and its value."""
    for key, value in file.items():
        yield "file", key, key, value
    for variable, text in environment.items():
        if variable.startswith(prefix):
            yield "environment", variable, variable.removeprefix(prefix).lower(), text
    for key, value in flags.items():
        if value is not None:
            yield "flag", key, key, value
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise InvalidConfig(f"--set '{assignment:.80}' has no value", "write --set name=value")
        yield "--set", name, name, text


def _place(origin: str, path: Path | None) -> str:
    """The source of a setting, in the words of an error message."""
    if origin == "file" and path is not None:
        return f"'{path}'"
    return origin if origin == "--set" else f"the {origin}"


def _convert(kind: Any, key: str, value: Any, origin: str, path: Path | None) -> Any:
    try:
        return read_text(kind, value) if origin in _TEXT_ORIGINS else msgspec.convert(value, kind)
    except msgspec.MsgspecError as error:
        plain = plain_type(kind)
        hint = f"one of {', '.join(get_args(plain))}" if get_origin(plain) is Literal else ""
        raise InvalidConfig(f"setting '{key}' from {_place(origin, path)} is wrong: {error}", hint) from None


def _bounds(kind: Any) -> str:
    """The numeric bounds in the annotations of ``kind``."""
    metas = [note for note in getattr(kind, "__metadata__", ()) if isinstance(note, msgspec.Meta)]
    inner = [part for part in get_args(kind) if part is not NoneType] if not isinstance(kind, type) else []
    for meta in metas:
        if meta.ge is not None:
            return f"{meta.ge} to {meta.le}" if meta.le is not None else f"at least {meta.ge}" if meta.ge else ""
        if meta.gt is not None:
            return f"more than {meta.gt}"
    return _bounds(inner[0]) if inner and get_origin(kind) is not Literal else ""
