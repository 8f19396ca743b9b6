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
from penstock.online.server.http.request_layout import (
    Body,
    Place,
    RequestLayout,
    is_plain,
    plain_inputs,
    read,
    understand,
)
from penstock.online.server.shared_memory.registry import Lease, SharedMemory
from penstock.request import InferRequest
from penstock.tensor import Array, DataType, TensorSpec, from_wire

_MAX_CACHED = 1024
_MAX_PLAN_BYTES = 4096
_SHARED = b'"shared_memory_region"'


class HttpRequestDecoder:
    """Reads requests; remembers the JSON parts that clients send before their raw tensors, or instead of them, again and again.

    Belongs to the event loop.
    """

    def __init__(self, shared_memory: SharedMemory) -> None:
        self._shared_memory = shared_memory
        self._plans: dict[bytes, RequestLayout] = {}

    def __call__(self, handle: Handle, body: Body, json_length: int | None) -> tuple[InferRequest, AnswerForm]:
        """The request for ``handle`` in ``body``, and the form of its answer, which holds the shared memory that it uses.

        ``json_length`` is the header ``Inference-Header-Content-Length``, or None without it. Raises InvalidArgument,
        NotFound for a region, Unsupported.
        """
        if json_length is None:
            # While nothing is shared, whoever asks for a place is refused below, and nobody else's body is searched for one.
            if self._shared_memory.has_regions and len(body) <= _MAX_PLAN_BYTES and _SHARED in body:
                # Clients ask for the same places again and again.
                plan = self._plan(body, len(body))
            else:
                wire = read(body)
                if is_plain(wire):
                    return InferRequest(handle.name, plain_inputs(wire.inputs), handle.version, wire.id), TEXT
                plan = understand(wire)
            if plan.raw:
                raise InvalidArgument("'binary_data_size' is given, but not the header Inference-Header-Content-Length")
            inputs = plan.arrays.copy()
        elif json_length == 0:
            return _raw_request(handle, body), BINARY
        else:
            plan = self._plan(body, json_length)
            inputs = plan.arrays.copy()
            if json_length + plan.size != len(body):
                _explain_size(handle.name, plan, len(body) - json_length)
            for raw in plan.raw:
                if raw.start != raw.end and raw.datatype.itemsize > 1:
                    inputs[raw.name] = np.ndarray(raw.shape, raw.datatype.dtype, body, json_length + raw.start)
                else:
                    part = memoryview(body)[json_length + raw.start : json_length + raw.end]
                    inputs[raw.name] = from_wire(part, raw.datatype, raw.shape)
        form = plan.form
        if plan.shared or plan.placed:
            form = self._lease(plan, inputs)
        return InferRequest(handle.name, inputs, handle.version, plan.id, plan.outputs, plan.parameters), form

    def _plan(self, body: Body, json_length: int) -> RequestLayout:
        if json_length > len(body):
            raise InvalidArgument(f"the JSON part is said to have {json_length} bytes, but the body has {len(body)}")
        text = bytes(memoryview(body)[:json_length])
        plan = self._plans.get(text)
        if plan is None:
            plan = understand(read(text))
            if json_length <= _MAX_PLAN_BYTES:
                if len(self._plans) >= _MAX_CACHED:
                    self._plans.clear()
                self._plans[text] = plan
        return plan

    def _lease(self, plan: RequestLayout, inputs: dict[str, Array]) -> AnswerForm:
        """Add the inputs in shared memory, and say where outputs go."""
        lease = self._shared_memory.lease()
        try:
            for name, datatype, shape, place in plan.shared:
                inputs[name] = _leased(lease, name, datatype, shape, place)
            placements = {
                name: lease.place(place.region, place.offset, place.byte_size) for name, place in plan.placed.items()
            }
        except BaseException:
            lease.release()
            raise
        form = plan.form
        return AnswerForm(form.binary, form.classification, placements, lease)


def whole_body(spec: TensorSpec, body: Body) -> Array:
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


def _raw_request(handle: Handle, body: Body) -> InferRequest:
    """A body that is the model's only input."""
    specs = handle.signature.inputs
    if len(specs) != 1:
        raise InvalidArgument(
            f"a raw binary request is for models with 1 input, and model '{handle.name}' has {len(specs)}",
            "describe the inputs in JSON",
        )
    return InferRequest(handle.name, {specs[0].name: whole_body(specs[0], body)}, handle.version)


def _leased(lease: Lease, name: str, datatype: DataType, shape: list[int], place: Place) -> Array:
    expected = math.prod(shape) * datatype.itemsize
    if datatype.itemsize and place.byte_size != expected:
        raise InvalidArgument(
            f"input '{name}': shape {shape} of {datatype.value} takes {expected} bytes, "
            f"but 'shared_memory_byte_size' is {place.byte_size}"
        )
    return lease.array(place.region, place.offset, place.byte_size, datatype, shape)


def _explain_size(model_name: str, plan: RequestLayout, size: int) -> None:
    for raw in plan.raw:
        if raw.end > size:
            raise InvalidArgument(
                f"unexpected size for input '{raw.name}', expecting {raw.end - size} additional bytes "
                f"for model '{model_name}'"
            )
    raise InvalidArgument(
        f"unexpected additional input data for model '{model_name}': {size - plan.size} bytes are left over"
    )
