"""Encodes inference responses over HTTP: JSON, optionally followed by raw tensors. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from penstock.errors import bounded
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.answer_form import ALL, NONE, AnswerForm
from penstock.online.server.http.answer import JSON
from penstock.online.server.http.codec.json_tensor import to_json, to_pieces
from penstock.online.server.request_layout import BoundedCache
from penstock.online.server.to_thread import INLINE_BYTES, Steps, beside
from penstock.request import InferResponse
from penstock.tensor import Array, Buffer, DataType, to_wire

_SMALL_BYTES = 4096
_TEXT_GROWTH = 6
"""Bytes of memory that JSON and one copy of it take, per byte of the encoded array."""


Encoded = tuple[bytes, bytes, Sequence[Buffer]]
"""An encoded response: header lines with CRLF, the JSON followed by small raw tensors, and a list of large raw tensors."""


class _Template(msgspec.Struct, frozen=True):
    """A response without its data, for one combination of output names, datatypes and shapes."""

    text: bytes
    """The JSON, with ``%b`` for the data of each output."""
    binary: bytes
    """The JSON if all outputs are sent as raw bytes; empty if their sizes vary."""
    binary_headers: bytes
    is_small: bool
    """True if the raw tensors are small enough to be joined."""
    is_light: bool
    """True if all outputs are numbers, and writing them as JSON takes less time than switching threads."""


class HttpAnswerEncoder:
    """Encodes responses. Caches templates for responses of the same layout. Used only on the event loop."""

    def __init__(self, limit: ResponseLimit = ResponseLimit()) -> None:  # noqa: B008 - immutable
        self._limit = limit
        self._templates = BoundedCache[tuple[object, ...], _Template]()

    def __call__(self, response: InferResponse, form: AnswerForm, inline: bool = False) -> Encoded | None:
        """Encode ``response``. With ``inline``, returns None if encoding would take more time than switching threads.

        Raises InvalidArgument if an output does not have the requested form, and ResponseTooLarge.
        """
        if form.placements or response.id or response.parameters:
            return None if inline and not self.is_light(response, form) else self._write(response, form)
        outputs = response.outputs
        is_single = len(outputs) == 1
        if is_single:
            ((name, array),) = outputs.items()
            key: tuple[object, ...] = (response.model_name, response.model_version, name, array.dtype, array.shape)
        else:
            parts: list[object] = [response.model_name, response.model_version]
            for name, array in outputs.items():
                parts += (name, array.dtype, array.shape)
            key = tuple(parts)
        template = self._templates.get(key) or self._prepare(key, response)
        if form.binary is NONE:
            if inline and not template.is_light and not is_light(outputs.values()):
                return None
            values = to_json(name, array) if is_single else tuple([to_json(*output) for output in outputs.items()])
            return JSON, template.text % values, ()
        if form.binary is ALL and template.binary:
            if template.is_small:
                data = array.tobytes() if is_single else b"".join([array.tobytes() for array in outputs.values()])
                return template.binary_headers, template.binary + data, ()
            tensors = [to_wire(array) for array in outputs.values()]
            self._limit.check(outputs, tensors)
            return template.binary_headers, template.binary, tensors
        return None if inline and not self.is_light(response, form) else self._write(response, form)

    def in_steps(self, response: InferResponse, form: AnswerForm) -> Steps[Encoded]:
        """Encode a large response in short steps, on any thread. Returns the JSON in parts. Raises the same errors as ``__call__``."""
        parts: list[Buffer] = [_head(response)]
        tensors: list[Buffer] = []
        held = 0
        texts = {
            name: array
            for name, array in response.outputs.items()
            if name not in form.placements and name not in form.binary
        }
        self._limit.check_text(texts)
        for number, (name, array) in enumerate(response.outputs.items()):
            description = (b"," if number else b"") + _describe(name, array)
            if name in form.placements:
                yield held
                form.placements[name].write(array)
                parts.append(description + b"}")
            elif name in form.binary:
                yield held + (2 * weight(array) if array.dtype.hasobject else 0)
                tensor = to_wire(array)
                parts.append(_sized(description, len(tensor)))
                tensors.append(tensor)
                held += len(tensor) if array.dtype.hasobject else 0
            else:
                parts.append(description + b',"data":')
                pieces = yield from beside(held, to_pieces(name, array))
                parts += [*pieces, b"}"]
                held += sum(map(len, pieces))
        parts.append(b"]}")
        self._limit.check(response.outputs, [*parts, *tensors])
        headers = _binary_headers(sum(map(len, parts))) if tensors else JSON
        return headers, b"", [*parts, *tensors]

    def is_light(self, response: InferResponse, form: AnswerForm) -> bool:
        """True if encoding ``response`` takes less time than switching threads."""
        # Raw numeric tensors are sent without conversion.
        is_raw = form.binary is ALL and not form.classification
        return is_light(response.outputs.values(), is_raw)

    def _write(self, response: InferResponse, form: AnswerForm) -> Encoded:
        """Encode a response without using a template."""
        parts: list[bytes] = []
        tensors: list[Buffer] = []
        for name, array in response.outputs.items():
            description = _describe(name, array)
            if name in form.placements:
                form.placements[name].write(array)
                parts.append(description + b"}")
            elif name in form.binary:
                tensor = to_wire(array)
                parts.append(_sized(description, len(tensor)))
                tensors.append(tensor)
            else:
                parts.append(b'%b,"data":%b}' % (description, to_json(name, array)))
        text = _head(response) + b",".join(parts) + b"]}"
        if tensors:
            self._limit.check(response.outputs, [text, *tensors])
        return (_binary_headers(len(text)), text, tensors) if tensors else (JSON, text, ())

    def _prepare(self, key: tuple[object, ...], response: InferResponse) -> _Template:
        head = _head(response)
        described = [_describe(name, array) for name, array in response.outputs.items()]
        text = b",".join(part.replace(b"%", b"%%") + b',"data":%b}' for part in described)
        binary = headers = b""
        sizes = [array.nbytes for array in response.outputs.values()]
        if described and all(_is_plain(array.dtype) for array in response.outputs.values()):
            binary = head + b",".join(map(_sized, described, sizes)) + b"]}"
            headers = _binary_headers(len(binary))
        text = head.replace(b"%", b"%%") + text + b"]}"
        is_light = sum(sizes) <= INLINE_BYTES and not any(array.dtype.hasobject for array in response.outputs.values())
        return self._templates.remember(key, _Template(text, binary, headers, sum(sizes) <= _SMALL_BYTES, is_light))


def is_light(arrays: Iterable[Array], is_raw: bool = False) -> bool:
    """True if encoding ``arrays`` takes less time than switching threads. With ``is_raw``, numbers are not counted, because they are
    not converted.
    """
    size = 0
    for array in arrays:
        if array.dtype.hasobject:
            size += array.nbytes if array.nbytes > INLINE_BYTES else weight(array)
        elif not is_raw:
            size += array.nbytes
    return size <= INLINE_BYTES


def weight(array: Array) -> int:
    """Size of ``array`` in memory, in bytes, including its strings."""
    if not array.dtype.hasobject:
        return array.nbytes
    return array.nbytes + sum([len(one) for one in array.ravel().tolist() if isinstance(one, bytes | str)])


def in_one_step(outputs: Mapping[str, Array], write: Callable[[], bytes], limit: ResponseLimit) -> Steps[bytes]:
    """Call ``write`` in a single step. It encodes ``outputs`` as JSON. Raises ResponseTooLarge."""
    limit.check_text(outputs)
    yield _TEXT_GROWTH * sum(array.nbytes for array in outputs.values())
    yield _TEXT_GROWTH * sum(map(weight, outputs.values()))
    text = write()
    limit.check(outputs, [text])
    return text


def encode_error(message: str) -> bytes:
    """``{"error": message}``, with a long message shortened."""
    return orjson.dumps({"error": bounded(message)})


def _binary_headers(json_length: int) -> bytes:
    return b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n" % json_length


def _head(response: InferResponse) -> bytes:
    """The part of the JSON before the outputs."""
    known: dict[str, object] = {"id": response.id} if response.id else {}
    known |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.parameters:
        known["parameters"] = response.parameters
    return orjson.dumps(known)[:-1] + b',"outputs":['


def _describe(name: str, array: Array) -> bytes:
    """The JSON of an output up to and including its shape, without the closing brace."""
    datatype = DataType.from_numpy(array.dtype)
    return orjson.dumps({"name": name, "datatype": datatype.value, "shape": array.shape})[:-1]


def _sized(description: bytes, size: int) -> bytes:
    return b'%b,"parameters":{"binary_data_size":%d}}' % (description, size)


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """True if the elements have the same bytes in memory and on the wire."""
    return dtype.kind not in "OSU" and dtype.byteorder != ">"
