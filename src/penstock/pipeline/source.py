"""The text of a declaration, in YAML or TOML, as plain data that knows its lines.

The text may be hostile. YAML is read without aliases and tags, with the scalars of YAML 1.2 (``no`` is text), and within limits on
size, depth and number of values.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from penstock.errors import InvalidConfig, Unsupported, quoted, shortened

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 100_000

Path = tuple[str | int, ...]
"""Keys and indices from the top of the data to a value."""

_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9]\d*)|(?P<float>(?:\.\d+|\d+\.\d*|\d+(?=[eE]))(?:[eE][-+]?\d+)?))")
_DOTTED = re.compile(r"""(?<![\w"'-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){100}""")
"""A dotted key of so many parts that Python's parser, whose time grows with the square of the parts, would not end."""
_TOML_TOKEN = re.compile(
    r'''"""(?:[^\\]|\\.)*?"{3,5}|"(?:[^"\\]|\\.)*+"|\'{3}.*?\'{3,5}|\'[^\']*+\'|\#[^\n]*+|[][{}\n]|[^]["'\#{}\n]++''',
    re.DOTALL,
)
"""The tokens of valid TOML that can contain or end a statement: strings, comments, brackets, ends of lines, and all else."""
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


class Located(InvalidConfig):
    """An error whose message begins with the file and the line."""


class SourceText:
    """The data of a declaration. ``error`` makes errors that name the file and the line."""

    def __init__(self, name: str, data: Any, lines: Mapping[Path, int], toml: str = "") -> None:
        self.name = name
        self.data = data
        self._lines = lines
        self._toml = toml

    def line(self, path: Iterable[str | int]) -> int:
        """The line of the value at ``path``, or of the nearest value above it; 0 if unknown."""
        at = tuple(path)
        if self._toml:
            return _toml_line(self._toml, at)
        return next((found for end in range(len(at), -1, -1) if (found := self._lines.get(at[:end]))), 0)

    def error(self, path: Iterable[str | int], message: str, hint: str = "") -> Located:
        """The error about the value at ``path``."""
        return located(self.name, self.line(path), message, hint)


def located(name: str, line: int, message: str, hint: str = "") -> Located:
    """An error with the name of the file and the line, if it is known, in front of its ``message``."""
    return Located(f"{name}, line {line}: {message}" if line else f"{name}: {message}", hint)


def read_json(text: bytes, name: str) -> SourceText:
    """The data of the canonical form, ``text``. Raises InvalidConfig."""
    try:
        return SourceText(name, msgspec.json.decode(text), {})
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise located(name, 0, f"this is not valid JSON: {error}") from None


def read_source(text: bytes, name: str) -> SourceText:
    """The data of ``text``, which is TOML if the file's ``name`` ends in ``.toml``, otherwise YAML. Raises InvalidConfig."""
    if len(text) > MAX_BYTES:
        raise located(name, 0, f"the file has {len(text)} bytes, but a declaration has at most {MAX_BYTES} bytes")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise located(name, text[: error.start].count(b"\n") + 1, "the file is not UTF-8 text") from None
    found = (_read_toml if PurePath(name).suffix.lower() == ".toml" else _read_yaml)(decoded, name)
    for path, number in _infinite(found.data):  # the canonical form, which is JSON, cannot have them
        raise found.error(path, f"the number {number} is not finite", "write a finite number")
    return found


def _infinite(data: Any, path: Path = ()) -> Iterator[tuple[Path, float]]:
    """The numbers in ``data`` that are infinite or NaN, with their places."""
    if isinstance(data, float) and not math.isfinite(data):
        yield path, data
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from _infinite(value, (*path, key))


def _read_toml(text: str, name: str) -> SourceText:
    if dotted := _DOTTED.search(text):
        line = text.count("\n", 0, dotted.start()) + 1
        raise located(name, line, "a dotted key has more than 100 parts")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # Python's own ValueError for whole numbers of thousands of digits
        raise InvalidConfig(f"{name} is not valid TOML: {error}") from None
    if _depth_exceeds(data, MAX_DEPTH):
        raise located(name, 0, f"the values are nested deeper than {MAX_DEPTH} levels")
    return SourceText(name, data, {}, text)


def _depth_exceeds(data: Any, levels: int) -> bool:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return levels < 0 or any(_depth_exceeds(one, levels - 1) for one in inner)


def _toml_line(text: str, path: Path) -> int:
    """The first line of the statement that sets the value at ``path``, or the nearest value above it."""
    best, deepest = 1, 0
    table: Path = ()
    last: dict[Path, int] = {}
    for line, statement in _toml_statements(text):
        if statement.startswith("["):
            table = _table(tomllib.loads(statement), last)
            depth = next((n for n, (a, b) in enumerate(zip(table, path, strict=False)) if a != b), len(table))
        elif path[: len(table)] == table:
            depth = len(table) + _depth_of(tomllib.loads(statement), path[len(table) :])
        else:
            continue
        if min(depth, len(path)) > deepest:
            best, deepest = line, min(depth, len(path))
    return best


def _toml_statements(text: str) -> Iterator[tuple[int, str]]:
    """The statements of valid TOML, each with its first line."""
    line, level, begin, first = 1, 0, -1, 0
    for match in _TOML_TOKEN.finditer(text + "\n"):
        part = match[0]
        if part == "\n" and not level and begin >= 0:
            yield first, text[begin : match.start()]
            begin = -1
        elif begin < 0 and part[0] != "#" and not part.isspace():
            begin, first = match.start(), line
        level += (part in ("[", "{")) - (part in ("]", "}"))
        line += part.count("\n")


def _table(header: Any, last: dict[Path, int]) -> Path:
    """The path of the table that ``header`` begins. ``last`` has the index of the last element of each array of tables."""
    path: Path = ()
    while header:
        ((key, header),) = header.items()
        path = (*path, key)
        if isinstance(header, list):
            last[path] = last.get(path, -1) + 1
            header = None
        if path in last:
            path = (*path, last[path])
    return path


def _depth_of(data: Any, path: Path) -> int:
    """The number of keys of ``path`` that ``data`` has."""
    for depth, key in enumerate(path):
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return depth
    return len(path)


def _read_yaml(text: str, name: str) -> SourceText:
    try:
        import yaml  # noqa: PLC0415 - an extra, which only files in YAML need
    except ImportError:
        raise Unsupported(
            f"{name} is YAML, which needs the package pyyaml", "pip install pyyaml, or write it as TOML"
        ) from None
    try:
        return _YamlReader(name, yaml.parse(text, Loader=yaml.SafeLoader)).read()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
        raise located(
            name, mark.line + 1 if mark else 0, f"this is not valid YAML: {reason}", "check indentation and quotes"
        ) from None


class _YamlReader:
    """Builds data from the events of a YAML parser, without recursion deeper than the limit."""

    def __init__(self, name: str, events: Iterator[Any]) -> None:
        self._name = name
        self._events = (event for event in events if not type(event).__name__.startswith(("Stream", "DocumentEnd")))
        self._lines: dict[Path, int] = {}
        self._values = 0

    def read(self) -> SourceText:
        if next(self._events, None) is None:  # the start of the document
            return SourceText(self._name, None, {})
        data = self._value(next(self._events), ())
        if (more := next(self._events, None)) is not None:
            raise self._error(more, "the file contains a second document", "keep one document in the file")
        return SourceText(self._name, data, self._lines)

    def _value(self, event: Any, path: Path) -> Any:
        kind = type(event).__name__
        self._lines[path] = event.start_mark.line + 1
        self._values += 1
        if kind == "AliasEvent" or event.anchor is not None:
            mark = "*" if kind == "AliasEvent" else "&"
            raise self._error(event, f"the alias '{mark}{event.anchor}' is not supported", "write the value again")
        if event.tag is not None and event.tag != "!":
            raise self._error(event, f"the tag {quoted(event.tag)} is not supported", "remove it")
        if self._values > MAX_VALUES:
            raise self._error(event, f"the file has more than {MAX_VALUES} values")
        if len(path) > MAX_DEPTH:
            raise self._error(event, f"the values are nested deeper than {MAX_DEPTH} levels")
        if kind == "ScalarEvent":
            self._check_encodable(event)
            return self._scalar(event) if event.implicit[0] else event.value
        return self._mapping(path) if kind == "MappingStartEvent" else self._sequence(path)

    def _mapping(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for event in self._events:
            if type(event).__name__ == "MappingEndEvent":
                break
            if type(event).__name__ != "ScalarEvent":
                raise self._error(event, "a key must be text")
            self._check_encodable(event)
            if event.value in found:
                raise self._error(event, f"the key {quoted(event.value)} occurs twice", "remove one")
            found[event.value] = self._value(next(self._events), (*path, event.value))
            self._lines[(*path, event.value)] = event.start_mark.line + 1
        return found

    def _sequence(self, path: Path) -> list[Any]:
        found: list[Any] = []
        for event in self._events:
            if type(event).__name__ == "SequenceEndEvent":
                break
            found.append(self._value(event, (*path, len(found))))
        return found

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        if text.lower() in _WORDS and text in (text.lower(), text.upper(), text.title()):
            return _WORDS[text.lower()]
        if match := _NUMBER.fullmatch(text):
            if match["float"] is None and len(text) > 20:
                raise self._error(event, f"the number {shortened(text, 40)} is too large", "quote it if it is text")
            return int(text) if match["float"] is None else float(text)
        return text

    def _check_encodable(self, event: Any) -> None:
        if any("\ud800" <= one <= "\udfff" for one in event.value):
            raise self._error(
                event, "the text has half a surrogate pair, such as \\ud83d", "write the character itself"
            )

    def _error(self, event: Any, message: str, hint: str = "") -> Located:
        return located(self._name, event.start_mark.line + 1, message, hint)
