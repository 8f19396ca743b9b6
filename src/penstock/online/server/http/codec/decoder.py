"""Requests as the Open Inference Protocol writes them over HTTP: JSON and the binary tensor data extension. Free of sockets.

A binary body is a JSON part, whose length stands in a header, and then the raw tensors of those inputs that carry
``binary_data_size``, in order. Arrays decoded from it are views of the received buffer.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.errors import InvalidArgument
from penstock.online.repository.handle import Handle
from penstock.online.server.answer_form import BINARY, TEXT, AnswerForm
from penstock.online.server.http.codec.json_request import JsonLayout, is_plain, plain_inputs, read, understand
from penstock.online.server.request_layout import BoundedCache
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.request import InferRequest
from penstock.tensor import Array, Buffer, DataType, TensorSpec, from_wire

_MAX_KNOWN_BYTES = 4096
_SHARED = b'"shared_memory_region"'


class HttpRequestDecoder:
    """Reads requests; remembers the JSON parts that clients send before their raw tensors, or instead of them, again and again.

    Belongs to the event loop.
    """

    def __init__(self, shared_memory: SharedMemory) -> None:
        self._shared_memory = shared_memory
        self._layouts = BoundedCache[bytes, JsonLayout]()

    def __call__(self, handle: Handle, body: Buffer, json_length: int | None) -> tuple[InferRequest, AnswerForm]:
        """The request for ``handle`` in ``body``, and the form of its answer, which holds the shared memory that it uses.

        ``json_length`` is the header ``Inference-Header-Content-Length``, or None without it. Raises InvalidArgument,
        NotFound for a region, Unsupported.
        """
        if json_length is None:
            # Without registered regions a request for one is refused below, and other bodies are not searched.
            if self._shared_memory.has_regions and len(body) <= _MAX_KNOWN_BYTES and _SHARED in body:
                # Clients repeat requests for the same slices.
                layout = self._layout(body, len(body))
            else:
                wire = read(body)
                if is_plain(wire):
                    return InferRequest(handle.name, plain_inputs(wire.inputs), handle.version, wire.id), TEXT
                layout = understand(wire)
            if layout.raw:
                raise InvalidArgument("'binary_data_size' is given, but not the header Inference-Header-Content-Length")
            inputs = layout.arrays.copy()
        elif json_length == 0:
            return _raw_request(handle, body), BINARY
        else:
            layout = self._layout(body, json_length)
            inputs = layout.arrays.copy()
            if json_length + layout.size != len(body):
                _explain_size(handle.name, layout, len(body) - json_length)
            for (name, datatype, shape, _), start, end in layout.raw:
                if start != end and datatype.itemsize > 1:
                    inputs[name] = np.ndarray(shape, datatype.dtype, body, json_length + start)
                else:
                    inputs[name] = from_wire(memoryview(body)[json_length + start : json_length + end], datatype, shape)
        form = layout.lease(self._shared_memory, handle.name, inputs)
        return InferRequest(handle.name, inputs, handle.version, layout.id, layout.outputs, layout.parameters), form

    def _layout(self, body: Buffer, json_length: int) -> JsonLayout:
        if json_length > len(body):
            raise InvalidArgument(f"the JSON part is said to have {json_length} bytes, but the body has {len(body)}")
        text = bytes(memoryview(body)[:json_length])
        layout = self._layouts.get(text)
        if layout is None:
            layout = understand(read(text))
            if json_length <= _MAX_KNOWN_BYTES:
                self._layouts.remember(text, layout)
        return layout


def whole_body(spec: TensorSpec, body: Buffer) -> Array:
    """All of ``body`` as one tensor, the size of whose only free dimension follows from its length.

    If there are two, the first is the batch, of one row.
    """
    shape, datatype = list(spec.shape), spec.datatype
    if datatype is DataType.BYTES:
        shape = [1 if size == -1 else size for size in shape]
        if math.prod(shape) != 1:
            raise InvalidArgument(f"input '{spec.name}' of shape {list(spec.shape)} takes more than one BYTES element")
        element = np.empty(1, np.object_)
        element[0] = bytes(body)
        return element.reshape(shape)
    if shape.count(-1) > 1 and shape[0] == -1:
        shape[0] = 1
    if shape.count(-1) > 1:
        raise InvalidArgument(
            f"the shape of the raw input '{spec.name}' can not be deduced: {list(spec.shape)} has several free dimensions"
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
    """A body that is the model's only input."""
    specs = handle.signature.inputs
    if len(specs) != 1:
        raise InvalidArgument(
            f"a raw binary request is for models with 1 input, and model '{handle.name}' has {len(specs)}",
            "describe the inputs in JSON",
        )
    return InferRequest(handle.name, {specs[0].name: whole_body(specs[0], body)}, handle.version)


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
