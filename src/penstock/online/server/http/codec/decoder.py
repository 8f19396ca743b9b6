"""Decodes inference requests over HTTP: JSON, and the binary tensor data extension. No I/O.

A binary body consists of a JSON part and, in order, the raw tensors of the inputs with ``binary_data_size``. The header
``Inference-Header-Content-Length`` contains the length of the JSON part. The decoded arrays are views of the body.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.errors import InvalidArgument
from penstock.online.repository.handle import Handle
from penstock.online.server.answer_form import BINARY, TEXT, AnswerForm
from penstock.online.server.http.codec import large_json
from penstock.online.server.http.codec.json_request import (
    JsonLayout,
    plain_inputs,
    read,
    read_in_steps,
    understand,
)
from penstock.online.server.request_layout import VARIABLE, BoundedCache
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.online.server.to_thread import INLINE_BYTES, Steps
from penstock.request import InferRequest
from penstock.tensor import Array, Buffer, DataType, TensorSpec, from_wire

_MAX_KNOWN_BYTES = 4096
_SHARED = b'"shared_memory_region"'
_TEXT_GROWTH = 8
"""Maximum bytes of memory per byte of encoded BYTES elements. Each four-byte length becomes a pointer and a Python object."""


class HttpRequestDecoder:
    """Decodes requests. Caches the JSON parts of binary bodies, because clients repeat them. Used only on the event loop."""

    def __init__(self, shared_memory: SharedMemory) -> None:
        self._shared_memory = shared_memory
        self._layouts = BoundedCache[bytes, JsonLayout]()

    def __call__(self, handle: Handle, body: Buffer, json_length: int | None) -> tuple[InferRequest, AnswerForm]:
        """Decode ``body``. Returns the request for ``handle`` and the form of its response. The form holds the shared-memory lease.

        ``json_length`` is the value of the header ``Inference-Header-Content-Length``, or None if this header is absent. Raises
        InvalidArgument, Unsupported, and NotFound for an unknown shared-memory region.
        """
        if json_length is None:
            # Search the body only while regions are registered. Otherwise, ``lease`` refuses requests with shared memory below.
            if self._shared_memory.has_regions and len(body) <= _MAX_KNOWN_BYTES and _SHARED in body:
                # Use the cache, because clients repeat requests with the same regions.
                layout = self._layout(body, len(body))
            else:
                wire = read(body)
                plain = plain_inputs(wire)
                if plain is not None:
                    return InferRequest(handle.name, plain, handle.version, wire.id), TEXT
                layout = understand(wire)
            if layout.raw:
                raise _unframed()
            inputs = layout.arrays.copy()
        elif json_length == 0:
            return _raw_request(handle, body), BINARY
        else:
            layout = self._layout(body, json_length)
            inputs = layout.arrays.copy()
            _add_raw(layout, inputs, handle.name, body, json_length)
        return self.complete(handle, layout, inputs)

    def is_light(self, body: Buffer, json_length: int | None) -> bool:
        """True if decoding ``body`` takes less time than switching threads."""
        if len(body) <= INLINE_BYTES or json_length == 0:
            return True
        if json_length is None or json_length > INLINE_BYTES:
            return False
        # Elements of other datatypes are not examined.
        text = bytes(memoryview(body)[:json_length])
        return b'"BYTES"' not in text and b'"BOOL"' not in text

    def in_steps(
        self, handle: Handle, json_length: int | None, body: Buffer
    ) -> Steps[tuple[JsonLayout, dict[str, Array]]]:
        """The first half of decoding a large body. ``complete`` is the second half. May run on any thread. Raises InvalidArgument."""
        size = len(body) if json_length is None else json_length
        if size == 0 == json_length:
            is_text = any(spec.datatype is DataType.BYTES for spec in handle.signature.inputs)
            yield len(body) if is_text else 0
            return JsonLayout(form=BINARY), _raw_request(handle, body).inputs
        if size > len(body):
            raise _too_short(size, body)
        layout = understand((yield from read_in_steps(memoryview(body)[:size])))
        inputs = layout.arrays
        if json_length is not None:
            raw = sum(end - start for tensor, start, end in layout.raw if tensor.size_bytes == VARIABLE)
            yield large_json.GROWTH * size + _TEXT_GROWTH * raw
            _add_raw(layout, inputs, handle.name, body, size)
        elif layout.raw:
            raise _unframed()
        return layout, inputs

    def complete(self, handle: Handle, layout: JsonLayout, inputs: dict[str, Array]) -> tuple[InferRequest, AnswerForm]:
        """Add the inputs in shared memory to ``inputs``. Returns the request and the form of its response. Raises as ``__call__``."""
        request = InferRequest(handle.name, inputs, handle.version, layout.id, layout.outputs, layout.parameters)
        if not (layout.shared or layout.placed):
            return request, layout.form
        form = layout.lease(self._shared_memory, handle.name, inputs)
        request.lease = form.lease
        return request, form

    def _layout(self, body: Buffer, json_length: int) -> JsonLayout:
        if json_length > len(body):
            raise _too_short(json_length, body)
        text = bytes(memoryview(body)[:json_length])
        layout = self._layouts.get(text)
        if layout is None:
            layout = understand(read(text))
            if json_length <= _MAX_KNOWN_BYTES:
                self._layouts.remember(text, layout)
        return layout


def whole_body(spec: TensorSpec, body: Buffer) -> Array:
    """Read ``body`` as one tensor. Its length determines the free dimension. If there are two free dimensions, the first is 1.

    Raises InvalidArgument.
    """
    shape, datatype = list(spec.shape), spec.datatype
    if datatype is DataType.BYTES:
        shape = [1 if size == -1 else size for size in shape]
        if math.prod(shape) != 1:
            raise InvalidArgument(f"input '{spec.name}' of shape {list(spec.shape)} needs more than one BYTES element")
        element = np.empty(1, np.object_)
        element[0] = bytes(body)
        return element.reshape(shape)
    if shape.count(-1) > 1 and shape[0] == -1:
        shape[0] = 1
    if shape.count(-1) > 1:
        raise InvalidArgument(
            f"the shape of the raw input '{spec.name}' cannot be deduced: {list(spec.shape)} has several free dimensions"
        )
    if -1 in shape:
        row = math.prod(size for size in shape if size != -1) * datatype.itemsize
        shape[shape.index(-1)] = len(body) // row if row else 0
    if math.prod(shape) * datatype.itemsize != len(body):
        raise InvalidArgument(
            f"input '{spec.name}' of {datatype.value} and shape {list(spec.shape)} cannot have {len(body)} bytes"
        )
    return from_wire(body, datatype, shape)


def _raw_request(handle: Handle, body: Buffer) -> InferRequest:
    """Decode a request whose whole body is the raw tensor of the model's only input."""
    specs = handle.signature.inputs
    if len(specs) != 1:
        raise InvalidArgument(
            f"a raw binary request needs a model with 1 input, but model '{handle.name}' has {len(specs)}",
            "describe the inputs in JSON",
        )
    return InferRequest(handle.name, {specs[0].name: whole_body(specs[0], body)}, handle.version)


def _add_raw(layout: JsonLayout, inputs: dict[str, Array], model_name: str, body: Buffer, json_length: int) -> None:
    """Add the raw tensors in ``body`` to ``inputs``. Raises InvalidArgument."""
    if json_length + layout.size != len(body):
        _explain_size(model_name, layout, len(body) - json_length)
    if layout.views is not None:
        for name, shape, dtype, start in layout.views:
            inputs[name] = np.ndarray(shape, dtype, body, json_length + start)
        return
    for (name, datatype, shape, _), start, end in layout.raw:
        inputs[name] = from_wire(memoryview(body)[json_length + start : json_length + end], datatype, shape)


def _unframed() -> InvalidArgument:
    return InvalidArgument("'binary_data_size' requires the header Inference-Header-Content-Length")


def _too_short(json_length: int, body: Buffer) -> InvalidArgument:
    return InvalidArgument(f"Inference-Header-Content-Length is {json_length}, but the body has only {len(body)} bytes")


def _explain_size(model_name: str, layout: JsonLayout, size: int) -> None:
    for raw in layout.raw:
        if raw.end > size:
            raise InvalidArgument(
                f"unexpected size for input '{raw.tensor.name}', expecting {raw.end - size} additional bytes "
                f"for model '{model_name}'"
            )
    raise InvalidArgument(
        f"unexpected additional input data for model '{model_name}': {size - layout.size} bytes are left over"
    )
