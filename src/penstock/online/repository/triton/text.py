"""Reads model configurations from ``config.pbtxt`` (protobuf text) and JSON. Error messages contain the position and the field."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig
from penstock.protocol.messages import POOL, Message, ModelConfig

FILE = "config.pbtxt"
_MAX_BYTES, _MAX_SHOWN = 1 << 20, 200
_TOKEN = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[\w.+-]+|[{}<>\[\]]|\n""")


def config_path(folder: Path, config_name: str = "") -> Path:
    """The configuration file of the model in ``folder``: ``configs/<config_name>.pbtxt`` if it exists, else ``config.pbtxt``.

    ``config.pbtxt`` may be missing. Raises InvalidConfig for an invalid ``config_name``.
    """
    if config_name and not re.fullmatch(r"\w[\w.-]*", config_name):
        raise InvalidConfig(
            f"'{config_name}' is not a valid name of a configuration", "use letters, digits, '_', '-' and '.'"
        )
    named = folder / "configs" / f"{config_name}.pbtxt"
    return named if config_name and (named.exists() or named.is_symlink()) else folder / FILE


def read_config(folder: Path, config_name: str = "") -> Message:
    """Read the ``ModelConfig`` in the file ``config_path``. The result is empty if there is no such file.

    Raises InvalidConfig with model, file, line and column of an error.
    """
    path = config_path(folder, config_name)
    where = shown_path(folder, path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidConfig(f"{where}: is not a regular file")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        if path.is_symlink():
            raise InvalidConfig(f"{where}: is a broken link") from None
        return ModelConfig()
    except OSError as error:
        raise InvalidConfig(f"{where}: cannot be read: {error.strerror}") from None
    return parse_text(data, where)


def shown_path(folder: Path, path: Path) -> str:
    """``path`` relative to the repository, for errors."""
    return f"{folder.name}/{path.relative_to(folder).as_posix()}"


def parse_text(data: bytes, where: str) -> Message:
    """Parse ``data``, the text of the file ``where``. Raises InvalidConfig."""
    if len(data) > _MAX_BYTES:
        raise InvalidConfig(f"{where}: has more than {_MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidConfig(f"{where}:{line}: is not UTF-8", "save it as UTF-8 text") from None
    found = ModelConfig()
    try:
        text_format.Parse(text, found)
    except text_format.ParseError as error:
        raise _explain_text(error, text, where) from None
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"{where}: {_short(str(error))}") from None
    return found


def parse_json(name: str, text: str | bytes) -> Message:
    """Parse the JSON configuration that a client sent for model ``name``. Raises InvalidConfig."""
    where = f"configuration given for model '{name}'"
    if len(text) > _MAX_BYTES:
        raise InvalidConfig(f"{where}: has more than {_MAX_BYTES} bytes")
    try:
        if not isinstance(json.loads(text), dict):
            raise InvalidConfig(f"{where}: must be a JSON object")
        return json_format.Parse(text, ModelConfig())
    except json_format.ParseError as error:
        raise _explain_json(error, where) from None
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"{where}: is not JSON: {_short(str(error))}") from None


def parse_settings(settings: Mapping[str, Any], where: str) -> Message:
    """A configuration that sets only ``settings``, which have the field names of the schema. Raises InvalidConfig."""
    try:
        return json_format.ParseDict(dict(settings), ModelConfig())
    except json_format.ParseError as error:
        raise _explain_json(error, where) from None


def to_text(config: Message) -> str:
    """``config`` as the text of a ``config.pbtxt``, in the schema's order, with each list of numbers on one line."""
    text: str = text_format.MessageToString(
        config, as_utf8=True, use_index_order=True, use_short_repeated_primitives=True
    )
    return text


def _explain_text(error: text_format.ParseError, text: str, where: str) -> InvalidConfig:
    line, column = error.GetLine() or 1, error.GetColumn() or 1
    lines = text.split("\n")
    current = lines[line - 1] if line <= len(lines) else ""
    reason = str(error).partition(" : ")[2].removeprefix(f"'{current}': ").removeprefix("'': ").rstrip(".")
    open_parts, last = _open_at("\n".join([*lines[: line - 1], current[: column - 1]]))
    names = [name for name, _ in open_parts if name]
    place, path = f"{where}:{line}:{column}", ".".join([*names, last] if last else names)
    if unknown := re.match(r'Message type "(.+?)" has no field named "(.*)"', reason, re.DOTALL):
        return _unknown_field(place, POOL.FindMessageTypeByName(unknown[1]), unknown[2], names)
    if unknown := re.match(r'Enum type "(.+?)" has no value named (.*)', reason):
        return _unknown_value(f"{place}: '{path}'", unknown[1], unknown[2])
    if twice := re.search(r'should not have multiple "(\w+)" fields', reason):
        return InvalidConfig(f"{place}: '{'.'.join([*names, twice[1]])}' is given twice", "remove one")
    if other := re.match(r'Field "(\w+)" is specified along with field "(\w+)"', reason):
        return InvalidConfig(f"{place}: '{other[1]}' and '{other[2]}' exclude each other", "remove one of them")
    if reason.startswith(('Expected "}"', 'Expected ">"')) and open_parts:
        name, opened = open_parts[-1]
        return InvalidConfig(f"{place}: '{name}', opened in line {opened}, is not closed", "add a '}'")
    return InvalidConfig(f"{place}: '{path}': {_short(reason)}" if path else f"{place}: {_short(reason)}")


def _open_at(text: str) -> tuple[list[tuple[str, int]], str]:
    """The fields that are not closed at the end of ``text``, each with its first line's number, and the last field name."""
    parts: list[tuple[str, int]] = []
    last, line = "", 1
    for mark in _TOKEN.findall(text):
        if mark == "\n":
            line += 1
        elif mark in "{<[":
            parts.append((last, line))
            last = ""
        elif mark in "}>]":
            last = parts.pop()[0] if parts else ""
        elif mark[0].isalpha():
            last = mark
    return parts, last


def _unknown_field(place: str, kind: Descriptor, name: str, path: list[str]) -> InvalidConfig:
    shown = ".".join([*path, _short(name)])
    return InvalidConfig(f"{place}: there is no field '{shown}'", did_you_mean(name[:_MAX_SHOWN], kind.fields_by_name))


def _unknown_value(begin: str, kind: str, value: str) -> InvalidConfig:
    hint = did_you_mean(value[:_MAX_SHOWN].upper(), POOL.FindEnumTypeByName(kind).values_by_name)
    return InvalidConfig(f"{begin} is '{_short(value)}', which is not one of its values", hint)


def _explain_json(error: json_format.ParseError, where: str) -> InvalidConfig:
    """Convert ``error`` to an InvalidConfig with the path of the field, the reason, and a suggestion."""
    reason, path = str(error).partition("\n")[0].rstrip("."), ""
    while nested := re.match(r"Failed to parse (\w+) field: (.*)", reason, re.DOTALL):
        path, reason = f"{path}.{nested[1]}".removeprefix("."), nested[2]
    if full := re.search(r""" at "?ModelConfig\.?(.*?)"?$""", reason):
        path, reason = full[1] or path, reason[: full.start()]
    if unknown := re.match(r'Message type "(.+?)" has no field named "(.*?)"', reason, re.DOTALL):
        return _unknown_field(where, POOL.FindMessageTypeByName(unknown[1]), unknown[2], [path] if path else [])
    if unknown := re.match(r"Invalid enum value (.*) for enum type (.+)", reason, re.DOTALL):
        return _unknown_value(f"{where}: '{path}'", unknown[2], unknown[1])
    reason = reason.removeprefix("Failed to load JSON: ").removeprefix("Failed to load JSON: ")
    return InvalidConfig(f"{where}: '{path}': {_short(reason)}" if path else f"{where}: {_short(reason)}")


def _short(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
