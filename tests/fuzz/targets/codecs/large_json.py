"""Fuzzes the decoder of large JSON, against the plain one.

A message is JSON in which ``~`` stands for a list that is long enough for an array.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidArgument
from penstock.online.server.http.codec import large_json
from penstock.online.server.to_thread import finish
from penstock.tensor import as_bytes
from tests.fuzz.parts import words
from tests.fuzz.target import DecoderTarget

_LONG = (
    b"[%b]" % b",".join(b"%d" % number for number in range(200)),
    b"[%b]" % b",".join(b"[0.5,-1e3]" for _ in range(60)),
    b"[%b]" % b",".join(b'"a,[\\"]}"' for _ in range(60)),
    b"[%b]" % b",".join(b"true,false" for _ in range(50)),
    b"[%b]" % b",".join(b"%d" % (2**63 - 2 + number % 4) for number in range(60)),
)
_PADDING = b" " * large_json.LARGE_BYTES
_MESSAGES = (
    b'{"inputs":[{"name":"x","data":~}]}',
    b'{"a":[~,~],"b":{"":0},"c":"~","d":[[~]]}',
    b"~",
    b'[{"x":~},{"y":[1,2,[3]]},"]",~]',
    b'{"x":[[1,2],[3,4]],"s":["\\ud83d\\ude00","\\\\"],"n":null,"f":1e-3}',
    b'{"a":"[","b":[{"c":~}],"":~}',
)


class LargeJsonTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"~",
        b"[~,~]",
        b'"',
        b"\\",
        b"]",
        b"[[",
        b"{",
        b'{"":1}',
        b"1e400",
        b"-",
        b"9" * 20,
        b",,",
    )

    def __init__(self) -> None:
        super().__init__([words(message) for message in _MESSAGES])

    def decode(self, data: bytes) -> object:
        text = data[:2000].replace(b"~", _LONG[len(data) % len(_LONG)]) + _PADDING
        try:
            expected: Any = msgspec.json.decode(text)
            is_valid = True
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            is_valid = False
        try:
            found = finish(large_json.read(text, msgspec.json.decode))
        except (InvalidArgument, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # it may refuse more: lists that mix types, numbers beyond 64 bits
        assert is_valid, "the plain decoder refuses it"
        assert _is_same(found, expected), f"{found!r} is not {expected!r}"
        return json.dumps(_plain(found))


def _is_same(found: Any, expected: Any) -> bool:
    """Whether ``found``, with arrays, has the values of ``expected``. Integers beside floats have become floats."""
    if isinstance(found, np.ndarray):
        return bool(_plain(found) == expected)
    if isinstance(found, dict):
        same_names = isinstance(expected, dict) and list(found) == list(expected)
        return same_names and all(_is_same(one, expected[name]) for name, one in found.items())
    if isinstance(found, list):
        same_size = isinstance(expected, list) and len(found) == len(expected)
        return same_size and all(map(_is_same, found, expected))
    return bool(found == expected)


def _plain(value: Any) -> Any:
    """``value`` without arrays; elements of texts become strings."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return as_bytes(value).decode() if isinstance(value, bytes) else value
