"""Reads the JSON part of an inference request, but not the raw tensors that follow the JSON. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from penstock.errors import InvalidArgument
from penstock.online.server.answer_form import ALL, BINARY, NONE, TEXT, AnswerForm
from penstock.online.server.http.codec import large_json
from penstock.online.server.http.codec.json_tensor import from_json
from penstock.online.server.request_layout import (
    VARIABLE,
    RequestLayout,
    TensorLayout,
    check_names,
    find_datatype,
    read_slice,
    whole_number,
)
from penstock.online.server.to_thread import Steps
from penstock.request import MAX_PARAMETERS, check_bytes_elements
from penstock.tensor import MAX_RANK, Array, Buffer

_MAX_TENSORS = 4096

Parameters = Annotated[dict[str, bool | int | float | str], msgspec.Meta(max_length=MAX_PARAMETERS)]


class WireInput(msgspec.Struct, gc=False):
    """An input in JSON."""

    name: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAX_RANK)]
    datatype: str
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters = {}


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: Parameters = {}


class WireRequest(msgspec.Struct, gc=False):
    """A request in JSON."""

    inputs: Annotated[list[WireInput], msgspec.Meta(max_length=_MAX_TENSORS)]
    id: str = ""
    parameters: Parameters = {}
    outputs: Annotated[list[_Output], msgspec.Meta(max_length=_MAX_TENSORS)] = []


class _FloatInput(WireInput, gc=False):
    datatype: Literal["FP32", "FP64"]
    data: list[float] | msgspec.UnsetType = msgspec.UNSET


class _FloatRequest(WireRequest, gc=False):
    """The most frequent form, in which all data are flat lists of floats. It is decoded in one pass."""

    inputs: Annotated[list[_FloatInput], msgspec.Meta(max_length=_MAX_TENSORS)]  # type: ignore[assignment]


class _LargeInput(WireInput, gc=False):
    data: Any = msgspec.UNSET
    """A list, or an array, because ``large_json`` converts long lists to arrays."""


class _LargeRequest(WireRequest, gc=False):
    """The form of a request that ``large_json`` has read."""

    inputs: Annotated[list[_LargeInput], msgspec.Meta(max_length=_MAX_TENSORS)]  # type: ignore[assignment]


class RawInput(NamedTuple):
    """An input whose elements follow the JSON part. ``start`` and ``end`` are offsets from the end of the JSON part."""

    tensor: TensorLayout
    start: int
    end: int


class JsonLayout(RequestLayout):
    """The layout of a request's JSON part."""

    id: str = ""
    raw: list[RawInput] = []
    size: int = 0
    """The size of all raw tensors, in bytes."""
    views: list[tuple[str, Sequence[int], np.dtype[Any], int]] | None = None
    """Name, shape, type and start of each raw tensor if all of them are views of the body; else None."""


_FLOATS = re.compile(b'"FP').search
_decode_request = msgspec.json.Decoder(WireRequest).decode
_decode_floats = msgspec.json.Decoder(_FloatRequest).decode
msgspec.json.Decoder(_LargeRequest)  # first use of the type, because several threads must not do this at once


def read_in_steps(text: Buffer) -> Steps[WireRequest]:
    """Decode ``text``, which may be large. Raises InvalidArgument."""
    if len(text) <= large_json.LARGE_BYTES:
        yield large_json.GROWTH * len(text)
        return read(text)
    try:
        request = msgspec.convert((yield from large_json.read(text, msgspec.json.decode)), _LargeRequest)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _malformed(text, error) from None
    except RecursionError:
        raise InvalidArgument("the body's JSON is nested too deeply") from None
    for tensor in request.inputs:
        if not isinstance(tensor.data, list | np.ndarray | msgspec.UnsetType):
            raise InvalidArgument(f"the 'data' of input '{tensor.name}' must be a list")
    return request


def read(text: Buffer) -> WireRequest:
    """Decode ``text``. Raises InvalidArgument."""
    try:
        if (_FLOATS(text) is not None) if isinstance(text, memoryview) else b'"FP' in text:
            try:
                return _decode_floats(text)
            except msgspec.ValidationError:
                pass  # nested lists, other datatypes, or invalid JSON, for which the general form gives better errors
        return _decode_request(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(text, error) from None
    except RecursionError:
        raise InvalidArgument("the body's JSON is nested too deeply") from None


def _malformed(text: Buffer, error: Exception) -> InvalidArgument:
    is_form = bytes(text[:2]) == b"--"  # the boundary of multipart/form-data
    hint = "send a form, such as that of curl -F, to '/run', which runs pipelines" if is_form else ""
    return InvalidArgument(f"the body is not an inference request: {error}", hint)


def plain_inputs(wire: WireRequest) -> dict[str, Array] | None:
    """The inputs if the request consists only of ``id`` and inputs with data; otherwise None. Raises InvalidArgument."""
    if wire.parameters or wire.outputs:
        return None
    inputs: dict[str, Array] = {}
    texts = 0
    for tensor in wire.inputs:
        if tensor.parameters:
            return None
        name, values = tensor.name, tensor.data
        if type(tensor) is _FloatInput and values is not msgspec.UNSET:
            inputs[name] = from_json(name, tensor.datatype, tensor.shape, values, True)
            continue
        if tensor.datatype == "BYTES":
            texts += math.prod(tensor.shape)
            check_bytes_elements(texts)
        inputs[name] = _from_json(tensor)
    if len(inputs) < len(wire.inputs):
        check_names(tensor.name for tensor in wire.inputs)
    return inputs


def understand(wire: WireRequest) -> JsonLayout:
    """The layout of ``wire``. Raises InvalidArgument."""
    check_bytes_elements(sum(math.prod(tensor.shape) for tensor in wire.inputs if tensor.datatype == "BYTES"))
    arrays = {tensor.name: _from_json(tensor) for tensor in wire.inputs if not tensor.parameters}
    layout = JsonLayout(arrays, wire.parameters, id=wire.id)
    for tensor in wire.inputs:
        if tensor.parameters:
            _note_input(layout, tensor)
    check_names(tensor.name for tensor in wire.inputs)
    _note_outputs(layout, wire)
    if all(start < end and tensor.datatype.itemsize > 1 for tensor, start, end in layout.raw):
        layout.views = [(tensor.name, tensor.shape, tensor.datatype.dtype, start) for tensor, start, _ in layout.raw]
    return layout


def _note_input(layout: JsonLayout, tensor: WireInput) -> None:
    """Add an input whose parameters say where its data are."""
    datatype = find_datatype(tensor.name, tensor.datatype)
    size = math.prod(tensor.shape) * datatype.itemsize if datatype.itemsize else VARIABLE
    noted = TensorLayout(tensor.name, datatype, tensor.shape, size)
    part = read_slice(f"input '{tensor.name}'", tensor.parameters)
    is_raw = "binary_data_size" in tensor.parameters
    if (tensor.data is not msgspec.UNSET) + is_raw + (part is not None) > 1:
        raise InvalidArgument(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But input '{tensor.name}' has several"
        )
    if is_raw:
        raw_size = whole_number(f"input '{tensor.name}'", tensor.parameters, "binary_data_size")
        if size not in (VARIABLE, raw_size):
            raise InvalidArgument(
                f"input '{tensor.name}': shape {list(tensor.shape)} of {tensor.datatype} takes {size} bytes, "
                f"but 'binary_data_size' is {raw_size}"
            )
        end = layout.size + raw_size
        layout.raw.append(RawInput(noted, layout.size, end))
        layout.size = end
    elif part is not None:
        layout.shared.append((noted, part))
    else:
        layout.arrays[tensor.name] = _from_json(tensor)


def _from_json(tensor: WireInput) -> Array:
    is_checked = type(tensor) is _FloatInput
    if not is_checked:
        find_datatype(tensor.name, tensor.datatype)
    if tensor.data is msgspec.UNSET:
        raise InvalidArgument(f"input '{tensor.name}' has no data")
    return from_json(tensor.name, tensor.datatype, tensor.shape, tensor.data, is_checked)


def _note_outputs(layout: JsonLayout, wire: WireRequest) -> None:
    """Set the requested outputs and their form. The parameters of an output override those of the request."""
    default = ALL if _flag(layout.parameters, "binary_data_output") else NONE
    layout.parameters.pop("binary_data_output", None)
    if not wire.outputs:
        layout.form = BINARY if default is ALL else TEXT
        return
    layout.note_outputs(output.name for output in wire.outputs)
    classification: dict[str, int] = {}
    binary = []
    for output in wire.outputs:
        what = f"output '{output.name}'"
        if count := whole_number(what, output.parameters, "classification", 0):
            classification[output.name] = count
        part = read_slice(what, output.parameters)
        if part is not None:
            layout.note_place(output.name, part, bool(count))
        elif _flag(output.parameters, "binary_data", output.name in default):
            binary.append(output.name)
    layout.form = AnswerForm(_among(binary, layout.outputs), classification)


def _among(binary: list[str], outputs: tuple[str, ...]) -> Container[str]:
    """``binary`` as a container: ``ALL`` if it contains all outputs, ``NONE`` if it is empty."""
    if not binary:
        return NONE
    return ALL if len(binary) == len(outputs) else frozenset(binary)


def _flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidArgument(f"'{name}' must be true or false, not {value!r}")
    return value
