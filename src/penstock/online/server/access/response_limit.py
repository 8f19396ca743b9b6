"""Limits the size of a response, so that a small request for large outputs does not fill the server's and the client's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import orjson

from penstock.errors import ResourceExhausted, quoted
from penstock.tensor import Array, Buffer, as_bytes

_SAMPLE = 4096
"""Number of elements of an output whose text is measured."""
_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_TOLERANCE = 1.25
"""An estimate refuses a response only if it exceeds the limit by this factor, so that no response that fits is refused."""


class ResponseTooLarge(ResourceExhausted):
    """A response has more bytes than the server sends."""

    http_status = 413


class ResponseLimit(msgspec.Struct, frozen=True):
    """The limit on the bytes of one response, as JSON or as a message, before compression."""

    size: int = 0
    """Maximum bytes; 0 sets no limit."""

    def check(self, outputs: Mapping[str, Array], parts: Iterable[Buffer]) -> None:
        """Raise ResponseTooLarge if the encoded ``parts`` of ``outputs`` exceed the limit."""
        if self.size and (size := sum(map(len, parts))) > self.size:
            self._refuse(outputs, f"{size}")

    def check_text(self, outputs: Mapping[str, Array]) -> None:
        """Raise ResponseTooLarge if ``outputs`` are clearly too large as JSON. The size is estimated before they are encoded."""
        if self.size and (size := sum(map(_text_bytes, outputs.values()))) > _TOLERANCE * self.size:
            self._refuse(outputs, f"about {size}")

    def _refuse(self, outputs: Mapping[str, Array], size: str) -> None:
        name = max(outputs, key=lambda name: outputs[name].nbytes)
        shape = list(outputs[name].shape)
        raise ResponseTooLarge(
            f"the response would have {size} bytes, and may have at most {self.size}: "
            f"output {quoted(name)} has the shape {shape}",
            "request fewer or smaller outputs or, instead of JSON, binary data; 'max_response_bytes' sets the limit",
        )


def _text_bytes(array: Array) -> int:
    """The approximate bytes of ``array`` as JSON, from the text of some elements. They are drawn at random, so that no client can
    choose which elements are measured.
    """
    if not array.size:
        return 2
    some = array.reshape(-1) if array.size <= _SAMPLE else _drawn(array)
    if array.dtype.hasobject:
        text = sum(len(as_bytes(one)) + 3 for one in some.tolist())
    else:
        text = len(orjson.dumps(some.astype(np.float32) if some.dtype.itemsize == 2 else some, option=_NUMPY))
    return int(text * (array.size / some.size))


def _drawn(array: Array) -> Array:
    return np.asarray(array.flat[np.random.default_rng().integers(0, array.size, _SAMPLE)])
