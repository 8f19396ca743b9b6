"""Decodes inference requests over HTTP: JSON, and the binary tensor data extension. No I/O.

A binary body consists of a JSON part, whose length is in a header, and the raw tensors of the inputs with
``binary_data_size``, in order. The decoded arrays are views of the body.
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
    """Decodes requests. It caches the JSON parts of binary bodies, which clients repeat. Belongs to the event loop."""

    def __init__(self, shared_memory: SharedMemory) -> None:
        self._shared_memory = shared_memory
        self._layouts = BoundedCache[bytes, JsonLayout]()

    def __call__(self, handle: Handle, body: Buffer, json_length: int | None) -> tuple[InferRequest, AnswerForm]:
        """The request for ``handle`` in ``body``, and the form of its response, which holds the lease of shared memory.

        ``json_length`` is the header ``Inference-Header-Content-Length``, None without it. Raises InvalidArgument, NotFound
        (unknown region), Unsupported.
        """
        if json_length is None:
            # Bodies are searched only while regions are registered; otherwise ``lease`` refuses the request below.
            if self._shared_memory.has_regions and len(body) <= _MAX_KNOWN_BYTES and _SHARED in body:
                # Clients repeat requests for the same regions.
                layout = self._layout(body, len(body))
            else:
                wire = read(body)
                if is_plain(wire):
                    return InferRequest(handle.name, plain_inputs(wire.inputs), handle.version, wire.id), TEXT
                layout = understand(wire)
            if layout.raw:
                raise InvalidArgument("'binary_data_size' requires the header Inference-Header-Content-Length")
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
            raise InvalidArgument(
                f"Inference-Header-Content-Length is {json_length}, but the body has only {len(body)} bytes"
            )
        text = bytes(memoryview(body)[:json_length])
        layout = self._layouts.get(text)
        if layout is None:
            layout = understand(read(text))
            if json_length <= _MAX_KNOWN_BYTES:
                self._layouts.remember(text, layout)
        return layout


def whole_body(spec: TensorSpec, body: Buffer) -> Array:
    """``body`` as one tensor. Its length determines the free dimension; of two free dimensions, the first is a batch of 1.

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
    """The request whose body is the raw tensor of the model's only input."""
    specs = handle.signature.inputs
    if len(specs) != 1:
        raise InvalidArgument(
            f"a raw binary request needs a model with 1 input, but model '{handle.name}' has {len(specs)}",
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
