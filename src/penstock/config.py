"""How configuration is declared, merged and explained.

A configuration is a frozen ``msgspec.Struct`` beside the code that it configures; each field has a type, a default and a
docstring. Its value is put together from, weakest first: the defaults, a TOML file, the environment
(``PENSTOCK_<SECTION>_<FIELD>``) and command-line flags. Every value remembers where it came from.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

import msgspec

from penstock.errors import InvalidConfig, NotFound

_Config = TypeVar("_Config", bound=msgspec.Struct)


class Resolved(msgspec.Struct, Generic[_Config], frozen=True):
    """A configuration and, by field, what decided its value: ``default``, ``file``, ``environment`` or ``flag``."""

    config: _Config
    origins: dict[str, str]

    def explain(self) -> list[tuple[str, Any, str]]:
        """``(field, effective value, origin)`` for every field, in declared order."""
        return [(name, getattr(self.config, name), origin) for name, origin in self.origins.items()]


def resolve(
    into: type[_Config],
    section: str,
    file: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Resolved[_Config]:
    """Merge the sources of ``section`` into a configuration. A flag of None counts as not given. Raises InvalidConfig."""
    names = [field.name for field in msgspec.structs.fields(into)]
    prefix = f"PENSTOCK_{section.upper()}_"
    from_environment = {
        key.removeprefix(prefix).lower(): value for key, value in (environment or {}).items() if key.startswith(prefix)
    }
    from_flags = {key: value for key, value in (flags or {}).items() if value is not None}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(names, "default")
    for origin, source in (("file", file or {}), ("environment", from_environment), ("flag", from_flags)):
        for key, value in source.items():
            if key not in names:
                shown = prefix + key.upper() if origin == "environment" else key
                raise InvalidConfig(f"unknown setting '{shown}' in the {origin}", did_you_mean(key, names))
            values[key] = _convert(into, key, value, origin)
            origins[key] = origin
    try:
        return Resolved(into(**values), origins)
    except ValueError as error:
        raise InvalidConfig(f"bad {section} configuration: {error}") from None


def read_file(path: Path, sections: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file by section name. Raises NotFound, InvalidConfig on a syntax error or an unknown section."""
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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint: the known word nearest to ``word``, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"


def _convert(into: type[msgspec.Struct], key: str, value: Any, origin: str) -> Any:
    field = next(field for field in msgspec.structs.fields(into) if field.name == key)
    if origin == "environment" and get_origin(field.type) is tuple:
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        # The environment holds text only; "8000" and "true" are read as what the field is.
        return msgspec.convert(value, field.type, strict=origin != "environment")
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"setting '{key}' from the {origin} is wrong: {error}", _choices(field.type)) from None


def _choices(kind: Any) -> str:
    """A hint: the values of a literal type; empty for others."""
    return f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else ""
