"""Tensors as nested JSON lists, as in TensorFlow Serving, KServe v1 and TorchServe. Pure.

The nesting determines the shape. BYTES elements are strings or ``{"b64": …}``. FP16 and BF16 elements are numbers. Requests and
responses may contain ``NaN`` and ``Infinity``, which are not valid JSON.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from itertools import chain
from operator import methodcaller
from typing import Any

import msgspec
import numpy as np
import orjson

from penstock.errors import InvalidArgument
from penstock.online.server.http.codec import large_json
from penstock.online.server.http.codec.json_tensor import from_json
from penstock.online.server.to_thread import Steps
from penstock.request import check_bytes_elements
from penstock.tensor import Array, Buffer, DataType, TensorSpec, as_bytes

_MAX_RANK = 32
_PIECE = 16 << 10
_CONTAINERS = (dict, list, np.ndarray)
_B64 = "b64"
_BYTES_SUFFIX = "_bytes"
_to_plain = methodcaller("tolist")
"""Converts arrays and elements that orjson and json do not support."""
_HALVES = (DataType.FP16, DataType.BF16)


def read_json(body: Buffer) -> Steps[Any]:
    """Decode ``body``, which may contain ``NaN`` and ``Infinity``. Long lists become arrays. Raises InvalidArgument."""
    try:
        return (yield from large_json.read(body, _decode))
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidArgument(f"JSON Parse error: {error}") from None
    except RecursionError:
        raise InvalidArgument("JSON Parse error: nested too deeply") from None


def _decode(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        if b"NaN" not in text and b"Infinity" not in text:
            raise
        value = json.loads(text.decode())
        if b"\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # like msgspec, raises an error for half a surrogate pair
        return value


def read_object(body: Buffer) -> Steps[dict[str, Any]]:
    """Decode ``body``, which must be an object. Raises InvalidArgument."""
    members = yield from read_json(body)
    if not isinstance(members, dict):
        raise InvalidArgument("JSON Value: Is not object", "the body must be a JSON object")
    return members


def is_named(value: Any) -> bool:
    """True if ``value`` is an object of named values, not a binary element ``{"b64": …}``."""
    return isinstance(value, dict) and not (value.keys() == {_B64} and isinstance(value[_B64], str))


def to_array(spec: TensorSpec, value: Any) -> Array:
    """Convert ``value`` to an array of ``spec``'s datatype. The shape is not checked.

    ``value`` is an element or evenly nested lists. The lists may contain arrays from ``large_json``.

    Raises InvalidArgument.
    """
    name, datatype = spec.name, spec.datatype
    shape, elements = _flatten(name, value)
    if datatype is DataType.BYTES:
        check_bytes_elements(len(elements))
        texts = np.empty(len(elements), np.object_)
        texts[:] = [element if type(element) is bytes else _to_bytes(name, element) for element in elements]
        return texts.reshape(shape)
    if datatype not in _HALVES:
        return from_json(name, datatype.value, shape, elements)
    wide = from_json(name, DataType.FP32.value, shape, elements)
    with np.errstate(all="ignore"):
        array: Array = wide.astype(datatype.dtype)
    if (np.isinf(array) != np.isinf(wide)).any():
        raise InvalidArgument(f"the data of input '{name}' do not fit {datatype.value}: a number is too large")
    return array


def to_value(name: str, array: Array) -> Any:
    """Convert output ``name`` for ``write_json``. Unless the output is a scalar, the result can be indexed by row.

    BYTES elements become ``{"b64": …}`` if ``name`` ends in ``_bytes``, or if any element is not UTF-8.
    """
    datatype = DataType.from_numpy(array.dtype)
    if datatype is not DataType.BYTES:
        return array.astype(np.float32) if datatype in _HALVES else array
    elements = [as_bytes(element) for element in array.ravel().tolist()]
    values = np.empty(len(elements), np.object_)
    try:
        values[:] = [None if name.endswith(_BYTES_SUFFIX) else element.decode() for element in elements]
    except UnicodeDecodeError:
        values[:] = None
    if None in values:
        values[:] = [{_B64: base64.b64encode(element).decode()} for element in elements]
    return values.reshape(array.shape).tolist()


def write_json(content: Any) -> bytes:
    """Encode plain data that may contain numeric arrays. Large data is encoded in pieces, so that other threads can run in between."""
    if type(content) is dict:
        return _enclose(b"{", [(orjson.dumps(name), b":", write_json(one)) for name, one in content.items()], b"}")
    if isinstance(content, np.ndarray):
        rows = len(content) if content.ndim else 0
        if content.size > _PIECE:
            step = max(1, _PIECE * rows // content.size)
            parts = (content[row : row + step] if step > 1 else content[row] for row in range(0, rows, step))
            return _enclose(b"[", [(write_json(one)[step > 1 : -1 if step > 1 else None],) for one in parts], b"]")
    elif type(content) is list and len(content) > 1 and (len(content) > _PIECE or type(content[0]) in _CONTAINERS):
        step = max(1, len(content) // 16)
        if len(content) <= 16:
            return _enclose(b"[", [(write_json(one),) for one in content], b"]")
        parts = (content[start : start + step] for start in range(0, len(content), step))
        return _enclose(b"[", [(write_json(one)[1:-1],) for one in parts], b"]")
    text = orjson.dumps(content, default=_to_plain, option=orjson.OPT_SERIALIZE_NUMPY)
    if b"null" in text:
        # orjson writes NaN and infinities as null.
        text = json.dumps(content, default=_to_plain, separators=(",", ":")).encode()
    return text


def _enclose(opening: bytes, members: Iterable[Iterable[bytes]], closing: bytes) -> bytes:
    """Join ``members`` with commas. Unlike formatting, joining copies large texts without the interpreter lock."""
    parts = [opening]
    for member in members:
        parts += (*member, b",")
    parts[max(1, len(parts) - 1) :] = [closing]
    return b"".join(parts)


def _to_bytes(name: str, element: Any) -> bytes:
    try:
        if isinstance(element, str):
            return element.encode()
        if isinstance(element, dict) and not is_named(element):
            text = element[_B64]
            return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error, ValueError) as error:
        raise InvalidArgument(f"Unable to decode an element of input '{name}': {error}") from None
    raise InvalidArgument(
        f"an element of input '{name}' must be a string or {{\"b64\": …}}, not {type(element).__name__}"
    )


def _flatten(name: str, value: Any) -> tuple[list[int], Any]:
    """The shape of ``value``, and its elements as a list or an array."""
    if type(value) is list and any(type(row) is np.ndarray for row in value):
        value = _stack(name, value)
    if isinstance(value, np.ndarray):
        return list(value.shape), value.reshape(-1)
    shape: list[int] = []
    level = [value]
    while level and type(level[0]) is list and len(shape) < _MAX_RANK:
        size = len(level[0])
        if any(type(part) is not list or len(part) != size for part in level):
            break
        shape.append(size)
        level = list(chain.from_iterable(level))
    if list in set(map(type, level)):
        hint = "give all lists of a level the same length"
        raise InvalidArgument(f"the data of input '{name}' are nested unevenly, or deeper than {_MAX_RANK} lists", hint)
    return shape, level


def _stack(name: str, rows: list[Any]) -> Array:
    """Join ``rows`` into one array. Long rows are arrays."""
    arrays = []
    for row in rows:
        shape, elements = _flatten(name, row)
        arrays.append(row if isinstance(row, np.ndarray) else large_json.compact(elements).reshape(shape))
    kinds = {array.dtype.kind for array in arrays}
    if len({array.shape for array in arrays}) > 1 or (len(kinds) > 1 and not kinds <= set("iuf")):
        raise InvalidArgument(f"the rows of input '{name}' differ in shape or type", "make them equal")
    return np.stack(arrays)
