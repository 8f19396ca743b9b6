"""Decodes large JSON in short steps. Long lists become arrays instead of Python lists. Pure.

Decoding a large text in one call would block all other threads, and a number in a Python list takes ten times the memory of its
text. A scan therefore first finds the long lists that contain no objects. These lists, flat or nested, are decoded in pieces into
compact arrays. The remaining text is short and is decoded in one call.
"""

from __future__ import annotations

import math
import re
import secrets
import struct
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np

from penstock.errors import InvalidArgument
from penstock.online.server.to_thread import Steps
from penstock.request import check_bytes_elements
from penstock.tensor import MAX_RANK, Array, Buffer

Decode = Callable[[bytes], Any]
"""Decodes a complete JSON text. The caller handles its exceptions."""

LARGE_BYTES = 64 << 10
"""Texts of at most this number of bytes are decoded in one call, which takes about a millisecond."""
_MAX_MARKS = 1 << 17
"""Maximum number of values outside long lists. A single call decodes these values, in at most about 40 milliseconds."""
_LONG = 256
_SCAN_BYTES = 256 << 10
_PIECE_BYTES = 16 << 10
GROWTH = 4
"""Maximum bytes of an array per byte of its text. For example, the two bytes ``0,`` become a 64-bit number."""
_ELEMENT_BYTES = 56
_SHAPE_COPIES = 6
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_OPENING = re.compile(rb"[ \t\r\n]{0,4096}+\[")
_EMPTY = re.compile(rb"\[[ \t\r\n]*+\]")
_STRUCTURE = re.compile(rb"[{}:]{1,4096}+")
_PART = re.compile(rb'(?:[^"{}:]{1,512}+|"(?:[^"\\]{1,512}+|\\.){0,64}+"){1,64}+', re.DOTALL)
_INSIDE = re.compile(rb'(?:[^"\\]{1,512}+|\\.){0,64}+("?)', re.DOTALL)
_TEXTS = re.compile(rb'(?:[^",]*+"(?:[^"\\]++|\\.)*+"[^",]*+(?:,|\Z)){1,512}+', re.DOTALL)
_TEXT_OR_END = re.compile(rb'"(?:[^"\\]++|\\.)*+"|\]', re.DOTALL)
_WITHOUT_BRACKETS = bytes.maketrans(b"[]", b"  ")
_UNSTRUCTURED = bytes(set(range(256)) - set(b"[],"))
_PLACE = secrets.token_hex(8)
"""Member name of the placeholders for long lists. It is random, so that a client cannot send a placeholder."""
_MIXED = "a long list in the body mixes values of different types"
_TOO_LARGE = "a number in a long list of the body does not fit in 64 bits, or in one type with the other numbers"
_UNEVEN = "a long list in the body is nested unevenly, or contains an empty list"


def read(text: Buffer, decode: Decode) -> Steps[Any]:
    """Decode ``text``. Long lists of numbers become arrays of int64, uint64, float64 or bool. Long lists of strings become arrays
    of bytes objects.

    Raises InvalidArgument, and the exceptions of ``decode``.
    """
    if len(text) <= LARGE_BYTES:
        yield GROWTH * len(text)
        return decode(bytes(text))
    yield _SCAN_BYTES
    text, told = memoryview(text), 0
    lists: list[tuple[int, int]] = []
    for start, stop in _scan(text):
        if stop > start:
            lists.append((start, stop))
        if stop - told > _SCAN_BYTES:
            told = stop
            yield _SCAN_BYTES
    yield len(text) - sum(stop - start for start, stop in lists)
    rest = _without(text, lists)
    marks = 0
    for start in range(0, len(rest), _SCAN_BYTES):
        part = rest[start : start + _SCAN_BYTES]
        marks += sum(map(part.count, (b",", b":", b"[")))
        if marks > _MAX_MARKS:
            raise InvalidArgument(
                f"the body's JSON has more than {_MAX_MARKS} values outside of long lists",
                "send each tensor as one list, or as binary data",
            )
    arrays: list[Array] = []
    held = len(rest)
    for start, stop in lists:
        array = yield from _read_list(text, start, stop, decode, held)
        held += array.nbytes if array.dtype != np.object_ else _ELEMENT_BYTES * array.size + stop - start
        arrays.append(array)
    # The caller converts the numbers to their datatypes. If their size changes, it shrinks at least to half.
    converting = sum(array.nbytes for array in arrays if array.dtype.kind in "iuf") // 2
    yield held + converting + len(rest) + _ELEMENT_BYTES * marks
    return _put(decode(rest), arrays)


def compact(elements: list[Any]) -> Array:
    """Convert a flat list to an array, as ``read`` does. Raises InvalidArgument if the types of its elements differ."""
    values = _Elements()
    values.add(elements)
    return values.array()


def converted(values: Array, dtype: np.dtype[Any]) -> Array:
    """Convert ``values``, a flat array, in short pieces, so that little memory is needed in addition to the result.

    If the elements keep their size, the result takes the place of ``values`` in memory.
    """
    if values.dtype == dtype:
        return values
    made: Array = values.view(dtype) if values.itemsize == dtype.itemsize else np.empty(values.size, dtype)
    for start in range(0, values.size, _PIECE_BYTES):
        stop = start + _PIECE_BYTES
        made[start:stop] = values[start:stop].astype(dtype)
    return made


def _without(text: memoryview, lists: Iterable[tuple[int, int]]) -> bytes:
    """``text`` with each of ``lists`` replaced by a numbered placeholder."""
    kept: list[Buffer] = []
    done = 0
    for number, (start, stop) in enumerate(lists):
        kept += [text[done:start], b'{"%b":%d}' % (_PLACE.encode(), number)]
        done = stop
    return b"".join([*kept, text[done:]])


def _put(value: Any, arrays: list[Array]) -> Any:
    """``value`` with each placeholder replaced by its array."""
    if type(value) is dict:
        if _PLACE in value:
            return arrays[value[_PLACE]]
        return {name: _put(one, arrays) for name, one in value.items()}
    if type(value) is list:
        return [_put(one, arrays) for one in value]
    return value


def _scan(text: memoryview) -> Iterator[tuple[int, int]]:
    """The extents of the long lists in ``text``, in order. Empty extents between them report the progress of the scan."""
    at, size = 0, len(text)
    while at < size:
        opening = _OPENING.match(text, at)
        if opening is None:
            at = _skip(text, at)
        else:
            start = opening.end() - 1
            at, is_whole = yield from _find_end(text, start)
            if is_whole and at - start >= _LONG:
                yield start, at
        if structure := _STRUCTURE.match(text, at):
            at = structure.end()
        yield at, at


def _skip(text: memoryview, at: int) -> int:
    """Skip the next part of ``text`` without ``{``, ``}`` and ``:``. Returns the position after it; ``at`` if there is none."""
    if part := _PART.match(text, at):
        return part.end()
    if bytes(text[at : at + 1]) != b'"':
        return at
    is_inside, at = True, at + 1
    while is_inside:
        inside = _INSIDE.match(text, at)
        if inside is None or inside.end() == at:
            raise InvalidArgument("a string in the body's JSON has no end")
        is_inside, at = not inside[1], inside.end()
    return at


def _find_end(text: memoryview, start: int) -> Generator[tuple[int, int], None, tuple[int, bool]]:
    """The end of the list at ``start``, and True. For a list with an object or a huge string: a position near it, and False."""
    depth, at = 0, start
    while (end := _skip(text, at)) > at:
        if end - at > _PIECE_BYTES and bytes(text[at : at + 1]) == b'"':
            return end, False
        part = bytes(text[at:end])
        plain = _STRING.sub(b"", part) if b'"' in part else part
        depth += plain.count(b"[") - plain.count(b"]")
        if depth <= 0 and b"]" in plain:
            return at + max(found.end() for found in _TEXT_OR_END.finditer(part) if found[0] == b"]"), True
        at = end
        yield at, at
    return at, False


def _read_list(text: memoryview, start: int, stop: int, decode: Decode, held: int) -> Steps[Array]:
    """Decode the list from ``start`` to ``stop`` as an array. ``held`` is the number of bytes that are already in memory."""
    values, skeleton = _Elements(), bytearray()
    told = start
    for piece, end in _pieces(text, start, stop):
        if end > told:
            told = min(stop, end + _SCAN_BYTES)
            yield held + values.size + len(skeleton) + GROWTH * (told - end + len(piece))
        rest, elements = _read_piece(piece, decode)
        values.add(elements)
        skeleton += rest.translate(None, _UNSTRUCTURED)
        if end < stop:
            skeleton += b","
    is_flat = skeleton.rfind(b"[") == 0 and skeleton.find(b"]") == len(skeleton) - 1
    if not is_flat:
        yield held + values.size + _SHAPE_COPIES * len(skeleton)
    array, shape = values.array(), [len(skeleton) - 1] if is_flat else _shape(bytes(skeleton))
    if array.size != math.prod(shape):
        raise InvalidArgument(_UNEVEN)
    return array.reshape(shape)


def _read_piece(piece: bytes, decode: Decode) -> tuple[bytes, list[Any]]:
    """The brackets and commas of ``piece``, and its elements."""
    rest = _STRING.sub(b"0", piece) if b'"' in piece else piece
    if _EMPTY.search(rest):
        raise InvalidArgument(_UNEVEN)
    if rest is piece:
        return piece, decode(b"[%b]" % piece.translate(_WITHOUT_BRACKETS))
    texts = _STRING.findall(piece)
    # Numbers and literals between strings would be lost here, but their presence changes the decoded list.
    if decode(b"[%b]" % rest.translate(_WITHOUT_BRACKETS)) != [0] * len(texts):
        raise InvalidArgument(_MIXED)
    return rest, decode(b"[%b]" % b",".join(texts))


def _pieces(text: memoryview, start: int, stop: int) -> Iterator[tuple[bytes, int]]:
    """Split the list from ``start`` to ``stop`` at commas. Yields each piece, and the start of the next piece."""
    at = start
    while at < stop:
        end = min(at + _PIECE_BYTES, stop)
        piece = bytes(text[at:end])
        if b'"' in piece:
            texts = _TEXTS.match(text, at, stop)
            if texts is None:
                raise InvalidArgument(_MIXED)
            end = texts.end()
        elif end < stop:
            end = at + piece.rfind(b",") + 1
            if end == at:
                raise InvalidArgument(f"a long list in the body has {_PIECE_BYTES} bytes without a comma")
        yield bytes(text[at : end - (end < stop)]), end
        at = end


def _shape(skeleton: bytes) -> list[int]:
    """The shape of evenly nested, non-empty lists. ``skeleton`` consists of their brackets and commas."""
    depth = len(skeleton) - len(skeleton.lstrip(b"["))
    if not 0 < depth <= MAX_RANK:
        raise InvalidArgument(f"a long list in the body is nested deeper than {MAX_RANK} lists")
    shape: list[int] = []
    inner, expected = 0, b""
    for level in range(1, depth + 1):
        length = skeleton.find(b"]" * level) + level - (depth - level)
        count = max(1, (length - 1) // (inner + 1))
        shape.insert(0, count)
        if count * (inner + 1) + 1 > len(skeleton):
            raise InvalidArgument(_UNEVEN)
        expected = b"[%b%b]" % ((expected + b",") * (count - 1), expected)
        inner = len(expected)
    if expected != skeleton:
        raise InvalidArgument(_UNEVEN)
    return shape


class _Elements:
    """A growing flat array with a single element type. When the first float is appended, all earlier integers become floats."""

    def __init__(self) -> None:
        self._letter = ""
        self._data = bytearray()
        self._texts: list[bytes] = []

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return sys.getsizeof(self._data) + _ELEMENT_BYTES * len(self._texts)

    def add(self, elements: list[Any]) -> None:
        """Append ``elements``. Raises InvalidArgument."""
        letter = _letter(elements)
        if letter != (self._letter or letter):
            letter = self._change(letter)
        self._letter = letter
        if letter == "O":
            check_bytes_elements(len(self._texts) + len(elements))
            self._texts += [element.encode() for element in elements]
            return
        try:
            self._data += struct.pack(f"<{len(elements)}{letter}", *elements)
        except (struct.error, OverflowError):
            raise InvalidArgument(_TOO_LARGE) from None

    def array(self) -> Array:
        if self._letter != "O":
            return np.frombuffer(self._data, f"<{_DTYPES[self._letter]}")
        array = np.empty(len(self._texts), np.object_)
        array[:] = self._texts
        return array

    def _change(self, letter: str) -> str:
        """Convert the elements to a type that can also represent elements of type ``letter``. Returns the new type."""
        if not {letter, self._letter} <= set("qQd"):
            raise InvalidArgument(_MIXED)
        common = "d" if "d" in (letter, self._letter) else "Q"
        known = self.array()
        if common == "Q" and known.min(initial=0) < 0:
            raise InvalidArgument(_TOO_LARGE)
        converted(known, np.dtype(f"<{_DTYPES[common]}"))  # in place
        return common


_DTYPES = {"q": "i8", "Q": "u8", "d": "f8", "?": "?"}


def _letter(elements: list[Any]) -> str:
    """The format character of ``struct`` for ``elements``, or ``O`` for strings."""
    types = set(map(type, elements))
    if types <= {int, float}:
        if float in types:
            return "d"
        if not elements or (min(elements) >= -(1 << 63) and max(elements) < 1 << 63):
            return "q"
        if min(elements) >= 0 and max(elements) < 1 << 64:
            return "Q"
        raise InvalidArgument(_TOO_LARGE)
    if types == {bool}:
        return "?"
    if types == {str}:
        return "O"
    raise InvalidArgument(_MIXED)
