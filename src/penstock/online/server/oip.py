"""The Open Inference Protocol's wire form over HTTP: JSON and the binary tensor data extension. Free of sockets.

A binary body is a JSON part, whose length stands in a header, and then the raw tensors of those inputs that carry
``binary_data_size``, in order. Arrays decoded from it are views of the received buffer.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Container
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson

from penstock.errors import InvalidArgument, Unsupported
from penstock.request import InferRequest, InferResponse
from penstock.tensor import Array, DataType, as_bytes, element_count, from_wire, to_wire

Body = bytes | bytearray
Parameters = dict[str, bool | int | float | str]

_MAX_RANK = 32
_MAX_CACHED = 1024
_MAX_PLAN_BYTES = 4096
_SMALL_BYTES = 4096


class _Everything:
    """Contains all names."""

    def __contains__(self, name: object) -> bool:
        return True


ALL: Container[str] = _Everything()
NONE: Container[str] = frozenset()


class _Input(msgspec.Struct, gc=False):
    name: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=_MAX_RANK)]
    datatype: str
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters = {}


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: Parameters = {}


class _Request(msgspec.Struct, gc=False):
    inputs: list[_Input]
    id: str = ""
    parameters: Parameters = {}
    outputs: list[_Output] = []


class _FloatInput(_Input, gc=False):
    datatype: Literal["FP32", "FP64"]
    data: list[float] | msgspec.UnsetType = msgspec.UNSET


class _FloatRequest(_Request, gc=False):
    """The most frequent request, read in one pass: flat floats only."""

    inputs: list[_FloatInput]  # type: ignore[assignment]


class _Form(msgspec.Struct):
    """How one datatype is read from JSON."""

    datatype: DataType
    letter: str = ""
    """Of ``struct``; empty for BYTES, and for those that have no JSON form."""
    kind: Any = None
    """The type of its elements in a list."""
    packers: dict[int, struct.Struct] = {}
    """By number of elements; bounded."""


class _Plan(msgspec.Struct):
    """A JSON part understood: all of a request but its raw tensors."""

    id: str
    arrays: dict[str, Array]
    """The inputs whose data are in the JSON."""
    raw: list[tuple[str, DataType, list[int], int, int]]
    """Of the others name, datatype, shape, and where their bytes begin and end, counted from the end of the JSON."""
    size: int
    """Bytes of all raw tensors."""
    parameters: Parameters
    outputs: tuple[str, ...] = ()
    binary: Container[str] = NONE


_FORMS = {
    form.datatype.value: form
    for form in (
        _Form(DataType.BOOL, "?", list[bool]),
        _Form(DataType.UINT8, "B", list[int]),
        _Form(DataType.UINT16, "H", list[int]),
        _Form(DataType.UINT32, "I", list[int]),
        _Form(DataType.UINT64, "Q", list[int]),
        _Form(DataType.INT8, "b", list[int]),
        _Form(DataType.INT16, "h", list[int]),
        _Form(DataType.INT32, "i", list[int]),
        _Form(DataType.INT64, "q", list[int]),
        _Form(DataType.FP32, "f", list[float]),
        _Form(DataType.FP64, "d", list[float]),
        _Form(DataType.BYTES, "", list[str]),
        _Form(DataType.FP16),
        _Form(DataType.BF16),
    )
}
_decode_request = msgspec.json.Decoder(_Request).decode
_decode_floats = msgspec.json.Decoder(_FloatRequest).decode

# A client sends the same JSON part before its raw tensors again and again.
_plans: dict[bytes, _Plan] = {}


def decode_infer(
    model_name: str, model_version: str, body: Body, json_length: int | None
) -> tuple[InferRequest, Container[str]]:
    """The request in ``body``, and the names of the outputs to be answered in binary.

    ``json_length`` is the header ``Inference-Header-Content-Length``, or None without it. Raises InvalidArgument,
    Unsupported.
    """
    if json_length is None:
        plan = _understand(body)
        if plan.raw:
            raise InvalidArgument("'binary_data_size' is given, but not the header Inference-Header-Content-Length")
        inputs = plan.arrays
    else:
        plan = _plan(body, json_length)
        inputs = plan.arrays.copy()
        if json_length + plan.size != len(body):
            _explain_size(model_name, plan, len(body) - json_length)
        for name, datatype, shape, start, end in plan.raw:
            if datatype.itemsize and start != end:
                inputs[name] = np.ndarray(shape, datatype.dtype, body, json_length + start)
            else:
                inputs[name] = from_wire(memoryview(body)[json_length + start : json_length + end], datatype, shape)
    return InferRequest(model_name, inputs, model_version, plan.id, plan.outputs, plan.parameters), plan.binary


def _plan(body: Body, json_length: int) -> _Plan:
    if json_length == 0:
        raise Unsupported("a raw binary request (header length 0) is not supported", "describe the input in JSON")
    if json_length > len(body):
        raise InvalidArgument(f"the JSON part is said to have {json_length} bytes, but the body has {len(body)}")
    text = bytes(memoryview(body)[:json_length])
    plan = _plans.get(text)
    if plan is None:
        plan = _understand(text)
        if json_length <= _MAX_PLAN_BYTES:
            if len(_plans) >= _MAX_CACHED:
                _plans.clear()
            _plans[text] = plan
    return plan


def _explain_size(model_name: str, plan: _Plan, size: int) -> None:
    for name, _, _, _, end in plan.raw:
        if end > size:
            raise InvalidArgument(
                f"unexpected size for input '{name}', expecting {end - size} additional bytes for model '{model_name}'"
            )
    raise InvalidArgument(
        f"unexpected additional input data for model '{model_name}': {size - plan.size} bytes are left over"
    )


def _understand(text: Body) -> _Plan:
    """Everything that can be known from the JSON alone."""
    try:
        wire = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not an inference request: {error}") from None
    except RecursionError:
        raise InvalidArgument("the body's JSON is nested too deeply") from None
    plan = _Plan(wire.id, {}, [], 0, wire.parameters)
    for tensor in wire.inputs:
        if tensor.name in plan.arrays or (plan.raw and any(tensor.name == name for name, *_ in plan.raw)):
            raise InvalidArgument(f"input '{tensor.name}' already exists in request")
        form = _FORMS.get(tensor.datatype)
        if form is None:
            raise InvalidArgument(f"invalid datatype for input {tensor.name}: '{tensor.datatype}'")
        size = _binary_size(tensor, form.datatype) if tensor.parameters else None
        if size is None:
            plan.arrays[tensor.name] = _from_json(tensor, form)
        else:
            plan.raw.append((tensor.name, form.datatype, tensor.shape, plan.size, plan.size + size))
            plan.size += size
    if wire.parameters or wire.outputs:
        _note_outputs(plan, wire)
    return plan


def _decode(text: Body) -> _Request:
    if b'"FP' in text:
        try:
            return _decode_floats(text)
        except msgspec.ValidationError:
            pass  # nested, or of other datatypes too, or wrong, which the general form tells better
    return _decode_request(text)


def _note_outputs(plan: _Plan, wire: _Request) -> None:
    """Which outputs are wanted, and which of them in binary: each one's own wish goes before the request's."""
    for name in plan.parameters:
        if name.startswith("triton_"):
            raise InvalidArgument(f"parameter keys starting with 'triton_' are reserved, as in '{name}'")
    if _flag(plan.parameters, "binary_data_output"):
        plan.binary = ALL
    plan.parameters.pop("binary_data_output", None)
    if wire.outputs:
        plan.outputs = tuple(output.name for output in wire.outputs)
        if len(set(plan.outputs)) != len(plan.outputs):
            raise InvalidArgument("an output is requested twice")
        for output in wire.outputs:
            _check_output(output)
        plan.binary = frozenset(
            output.name
            for output in wire.outputs
            if _flag(output.parameters, "binary_data", output.name in plan.binary)
        )


def _check_output(output: _Output) -> None:
    """Refuse wishes that would change what the answer holds."""
    if output.parameters.get("classification"):
        raise Unsupported("classification is not supported", f"ask for the values of output '{output.name}'")
    if "shared_memory_region" in output.parameters:
        raise Unsupported(f"output '{output.name}' in shared memory is not supported", "ask for its data")


def _flag(parameters: Parameters, name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidArgument(f"'{name}' must be true or false, not {value!r}")
    return value


def _binary_size(tensor: _Input, datatype: DataType) -> int | None:
    """How many raw bytes are this input's; None if its data are in the JSON."""
    parameters = tensor.parameters
    if "shared_memory_region" in parameters:
        raise Unsupported(f"input '{tensor.name}' is in shared memory, which is not supported", "send its data")
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise InvalidArgument(f"input '{tensor.name}': 'binary_data_size' must be a number of bytes, not {size!r}")
    if tensor.data is not msgspec.UNSET:
        raise InvalidArgument(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters'. "
            f"But input '{tensor.name}' has both"
        )
    expected = math.prod(tensor.shape) * datatype.itemsize
    if datatype.itemsize and size != expected:
        raise InvalidArgument(
            f"input '{tensor.name}': shape {tensor.shape} of {tensor.datatype} takes {expected} bytes, "
            f"but 'binary_data_size' is {size}"
        )
    return size


def _from_json(tensor: _Input, form: _Form) -> Array:
    if not form.letter and form.datatype is not DataType.BYTES:
        raise InvalidArgument(
            f"input '{tensor.name}': {tensor.datatype} has no JSON form", "send it as binary data, or as FP32"
        )
    values = tensor.data
    if values is msgspec.UNSET:
        raise InvalidArgument(f"input '{tensor.name}' has no data")
    if values and type(values[0]) is list:
        values = _flatten(tensor.name, values)
    # Before anything of the declared shape is made: the count is what the body really holds.
    count = math.prod(tensor.shape)
    if len(values) != count:
        raise InvalidArgument(
            f"input '{tensor.name}' of shape {tensor.shape} needs {count} elements, but 'data' has {len(values)}"
        )
    if not count:
        # The body bounds every other shape, but an empty one may still have dimensions beyond addressing.
        element_count(tensor.shape)
    try:
        if type(tensor) is not _FloatInput:
            # Packing alone would take true for 1.
            values = msgspec.convert(values, form.kind)
        if not form.letter:
            array = np.empty(count, np.object_)
            array[:] = [value.encode() for value in values]
            return array.reshape(tensor.shape)
        packer = form.packers.get(count)
        if packer is None:
            if len(form.packers) >= _MAX_CACHED:
                form.packers.clear()
            packer = form.packers[count] = struct.Struct(f"<{count}{form.letter}")
        # Three times as fast as np.array, which would also turn what is out of range into infinity.
        return np.ndarray(tensor.shape, form.datatype.dtype, packer.pack(*values))
    except (OverflowError, struct.error, msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidArgument(f"the data of input '{tensor.name}' do not fit {tensor.datatype}: {error}") from None


def _flatten(name: str, values: list[Any]) -> list[Any]:
    """The values of nested data. Its nesting need not follow the shape: only their count is checked."""
    while values and type(values[0]) is list:
        if set(map(type, values)) != {list}:
            raise InvalidArgument(f"the data of input '{name}' are nested unevenly")
        values = list(chain.from_iterable(values))
    return values


_heads: dict[tuple[str, str], bytes] = {}
_descriptions: dict[tuple[str, int, tuple[int, ...]], bytes] = {}


def encode_infer(response: InferResponse, binary: Container[str]) -> tuple[int | None, bytes]:
    """``(json_length, body)`` of the answer; the length is None if no output is binary. Raises InvalidArgument."""
    text = _head(response)
    tensors: list[bytes | memoryview] = []
    separator = b""
    for name, array in response.outputs.items():
        # Made once per output and shape, as is the head once per model version.
        description = _descriptions.get((name, array.dtype.num, array.shape)) or _describe(name, array)
        if binary is not NONE and name in binary:
            small = array.nbytes < _SMALL_BYTES and array.dtype.kind != "O"
            tensor = array.tobytes() if small else to_wire(array)
            text = b'%b%b%b,"parameters":{"binary_data_size":%d}}' % (text, separator, description, len(tensor))
            tensors.append(tensor)
        else:
            text = b'%b%b%b,"data":%b}' % (text, separator, description, _to_json(name, array))
        separator = b","
    text += b"]}"
    return (len(text), b"".join((text, *tensors))) if tensors else (None, text)


def encode_error(message: str) -> bytes:
    """``{"error": message}``."""
    return orjson.dumps({"error": message})


def _head(response: InferResponse) -> bytes:
    """The answer up to its outputs."""
    key = (response.model_name, response.model_version)
    head = _heads.get(key)
    if head is None:
        if len(_heads) >= _MAX_CACHED:
            _heads.clear()
        known = orjson.dumps({"model_name": response.model_name, "model_version": response.model_version})
        head = _heads[key] = known[:-1] + b',"outputs":['
    return b'{"id":%b,%b' % (orjson.dumps(response.id), head[1:]) if response.id else head


def _describe(name: str, array: Array) -> bytes:
    """An output up to its shape."""
    if len(_descriptions) >= _MAX_CACHED:
        _descriptions.clear()
    datatype = DataType.from_numpy(array.dtype)
    known = orjson.dumps({"name": name, "datatype": datatype.value, "shape": array.shape})
    description = _descriptions[name, array.dtype.num, array.shape] = known[:-1]
    return description


def _to_json(name: str, array: Array) -> bytes:
    if array.dtype.itemsize == 2 and (datatype := DataType.from_numpy(array.dtype)).is_float:
        raise InvalidArgument(f"output '{name}': {datatype.value} has no JSON form", "ask for it as 'binary_data'")
    try:
        data = orjson.dumps(array.ravel(), option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        # Not an array that orjson knows: BYTES.
        return _text_to_json(name, array)
    if b"null" in data:
        # orjson has no word for NaN and infinities. JSON has none either, but clients expect and read these.
        data = json.dumps(array.ravel().tolist(), separators=(",", ":")).encode()
    return data


def _text_to_json(name: str, array: Array) -> bytes:
    try:
        return orjson.dumps([as_bytes(element).decode() for element in array.ravel().tolist()])
    except UnicodeDecodeError:
        raise InvalidArgument(f"output '{name}' holds bytes that are not text", "ask for it as 'binary_data'") from None
