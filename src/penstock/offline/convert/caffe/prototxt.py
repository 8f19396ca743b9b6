"""Read protobuf's text format, in which Caffe's networks are written, without a schema.

The format: https://protobuf.dev/reference/protobuf/textformat-spec
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from penstock.errors import InvalidModel, quoted

T = TypeVar("T", bool, int, float, str)

_MAX_DEPTH = 64
_TOKEN = re.compile(
    r"""(?P<blank>(?:[\s,;]|\#[^\n]*)+)|(?P<text>(?:(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')\s*)+)|(?P<word>[\w.+-]+)|(?P<sign>.)"""
)
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
}
_LIMIT = 2**31
"""Whole numbers of a network are 32-bit numbers in Caffe."""


class TextMessage:
    """The fields of a message, with all values of each field in their order. A message that is absent has no fields."""

    def __init__(self, line: int = 0) -> None:
        self.line = line
        """Where the message begins, counted from 1; 0 if it is absent."""
        self._fields: dict[str, list[Any]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def add(self, name: str, value: object) -> None:
        self._fields.setdefault(name, []).append(value)

    def all(self, name: str, kind: type[T]) -> list[T]:
        """Every value of the field ``name``. Raises InvalidModel if one is not of ``kind``."""
        types, title = _KINDS[kind]
        values = self._fields.get(name, [])
        for value in values:
            is_right = isinstance(value, types) and (kind is bool or not isinstance(value, bool))
            if not is_right or (isinstance(value, int) and abs(value) >= _LIMIT):
                shown = "a message" if isinstance(value, TextMessage) else quoted(str(value))
                raise InvalidModel(f"line {self.line}: '{name}' must be {title}, got {shown}")
        return [kind(value) for value in values]

    def get(self, name: str, default: T) -> T:
        """The value of the field ``name``, which has the type of ``default``. Raises InvalidModel."""
        values = self.all(name, type(default))
        return values[-1] if values else default

    def messages(self, name: str) -> list[TextMessage]:
        """Every message in the field ``name``. Raises InvalidModel if one is not a message."""
        for value in self._fields.get(name, []):
            if not isinstance(value, TextMessage):
                raise InvalidModel(f"line {self.line}: '{name}' must be a message in braces, got {quoted(str(value))}")
        return self._fields.get(name, [])

    def message(self, name: str) -> TextMessage:
        """The message in the field ``name``; one without fields if it is absent. Raises InvalidModel."""
        return (self.messages(name) or [TextMessage()])[-1]


def read_prototxt(data: bytes) -> TextMessage:
    """Parse a file in text format. Raises InvalidModel with the line."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise InvalidModel("the network is not text, but binary data", "give the .prototxt file") from None
    return _Reader().read(text)


class _Reader:
    """Reads one file, token by token. The open messages are kept in a list, so that deep nesting needs no deep calls."""

    def __init__(self) -> None:
        self._open = [TextMessage(1)]
        self._closers: list[str] = []
        self._name = ""
        """The field whose value comes next; empty if a name comes next."""
        self._in_list = self._has_colon = False

    def read(self, text: str) -> TextMessage:
        line = 1
        for token in _TOKEN.finditer(text):
            try:
                self._take(token.lastgroup or "", token[0], line)
            except ValueError as error:
                raise InvalidModel(f"line {line}: {error}", "check the .prototxt file") from None
            line += token[0].count("\n")
        if self._closers or self._name:
            started = self._open[-1].line
            raise InvalidModel(f"the network ends within the message of line {started}", "the file may be truncated")
        return self._open[0]

    def _take(self, kind: str, token: str, line: int) -> None:
        if kind == "word" and not self._name:
            self._name, self._has_colon = token, False
        elif kind in ("word", "text") and self._has_colon:
            self._open[-1].add(self._name, _value(token) if kind == "word" else _text(token))
            self._name = self._name if self._in_list else ""
        elif kind == "sign":
            self._take_sign(token, line)
        elif kind != "blank":
            raise ValueError(f"{quoted(token)} is not expected here")

    def _take_sign(self, sign: str, line: int) -> None:
        if sign in "{<" and self._name:
            message = TextMessage(line)
            self._open[-1].add(self._name, message)
            self._open.append(message)
            self._closers.append("}" if sign == "{" else ">")
            self._name = ""
            if len(self._open) > _MAX_DEPTH or self._in_list:
                raise ValueError(f"messages are in a list, or nested deeper than {_MAX_DEPTH}")
        elif sign == ":" and self._name and not self._has_colon:
            self._has_colon = True
        elif sign == "[" and self._has_colon and not self._in_list:
            self._in_list = True
        elif sign == "]" and self._in_list:
            self._in_list, self._name = False, ""
        elif self._closers[-1:] == [sign] and not self._name:
            self._closers.pop()
            self._open.pop()
        else:
            raise ValueError(f"{quoted(sign)} is not expected here")


def _text(token: str) -> str:
    parts = re.findall(r""""((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'""", token)
    return re.sub(r"\\(.)", r"\1", "".join(one or other for one, other in parts))


def _value(word: str) -> bool | int | float | str:
    if word in ("true", "false"):
        return word == "true"
    try:
        return int(word, 0)
    except ValueError:
        pass
    try:
        return float(word if word.lower().endswith("inf") else word.rstrip("fF"))
    except ValueError:
        return word
