"""The JSON part of a request, understood: all that can be known of it without the raw tensors that follow. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec

from penstock.errors import InvalidArgument
from penstock.online.server.answer_form import ALL, BINARY, NONE, TEXT, AnswerForm
from penstock.online.server.http.json_tensor import from_json
from penstock.request import MAX_PARAMETERS, check_bytes_elements
from penstock.tensor import Array, Buffer, DataType

Body = Buffer

_MAX_RANK = 32
_MAX_TENSORS = 4096

Parameters = Annotated[dict[str, bool | int | float | str], msgspec.Meta(max_length=MAX_PARAMETERS)]


class WireInput(msgspec.Struct, gc=False):
    """An input as it is written."""

    name: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=_MAX_RANK)]
    datatype: str
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters = {}


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: Parameters = {}


class WireRequest(msgspec.Struct, gc=False):
    """A request as it is written."""

    inputs: Annotated[list[WireInput], msgspec.Meta(max_length=_MAX_TENSORS)]
    id: str = ""
    parameters: Parameters = {}
    outputs: Annotated[list[_Output], msgspec.Meta(max_length=_MAX_TENSORS)] = []


class _FloatInput(WireInput, gc=False):
    datatype: Literal["FP32", "FP64"]
    data: list[float] | msgspec.UnsetType = msgspec.UNSET


class _FloatRequest(WireRequest, gc=False):
    """The most frequent request, read in one pass: flat floats only."""

    inputs: Annotated[list[_FloatInput], msgspec.Meta(max_length=_MAX_TENSORS)]  # type: ignore[assignment]


class RawInput(msgspec.Struct, frozen=True):
    """An input whose elements follow the JSON, from ``start`` to ``end`` counted from there."""

    name: str
    datatype: DataType
    shape: list[int]
    start: int
    end: int


class Place(msgspec.Struct, frozen=True):
    """A place in shared memory."""

    region: str
    offset: int
    byte_size: int


class RequestLayout(msgspec.Struct):
    """A JSON part understood: all of a request but its raw tensors."""

    id: str
    arrays: dict[str, Array]
    """The inputs whose data are in the JSON."""
    parameters: Parameters
    raw: list[RawInput] = []
    size: int = 0
    """Bytes of all raw tensors."""
    shared: list[tuple[str, DataType, list[int], Place]] = []
    """The inputs that are in shared memory."""
    outputs: tuple[str, ...] = ()
    form: AnswerForm = TEXT
    """But for what goes into shared memory."""
    placed: dict[str, Place] = {}


_DATATYPES = {datatype.value: datatype for datatype in DataType}
_FLOATS = re.compile(b'"FP').search
_parameters = attrgetter("parameters")
_decode_request = msgspec.json.Decoder(WireRequest).decode
_decode_floats = msgspec.json.Decoder(_FloatRequest).decode


def read(text: Body) -> WireRequest:
    """The members of the protocol's request. Raises InvalidArgument."""
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not an inference request: {error}") from None
    except RecursionError:
        raise InvalidArgument("the body's JSON is nested too deeply") from None


def is_plain(wire: WireRequest) -> bool:
    """Whether nothing is said but ``id`` and inputs with their data."""
    return not (wire.parameters or wire.outputs or any(map(_parameters, wire.inputs)))


def plain_inputs(tensors: Sequence[WireInput]) -> dict[str, Array]:
    """Inputs without parameters. Raises InvalidArgument."""
    inputs: dict[str, Array] = {}
    texts = 0
    for tensor in tensors:
        if tensor.datatype == "BYTES":
            texts += math.prod(tensor.shape)
            check_bytes_elements(texts)
        inputs[tensor.name] = _from_json(tensor)
    if len(inputs) < len(tensors):
        _check_names(tensor.name for tensor in tensors)
    return inputs


def understand(wire: WireRequest) -> RequestLayout:
    """Everything that can be known from the JSON alone. Raises InvalidArgument."""
    check_bytes_elements(sum(math.prod(tensor.shape) for tensor in wire.inputs if tensor.datatype == "BYTES"))
    plan = RequestLayout(
        wire.id, plain_inputs([tensor for tensor in wire.inputs if not tensor.parameters]), wire.parameters
    )
    for tensor in wire.inputs:
        if tensor.parameters:
            _note_input(plan, tensor)
    _check_names(tensor.name for tensor in wire.inputs)
    _note_outputs(plan, wire)
    return plan


def _decode(text: Body) -> WireRequest:
    if (_FLOATS(text) is not None) if isinstance(text, memoryview) else b'"FP' in text:
        try:
            return _decode_floats(text)
        except msgspec.ValidationError:
            pass  # nested, or of other datatypes too, or wrong, which the general form tells better
    return _decode_request(text)


def _note_input(plan: RequestLayout, tensor: WireInput) -> None:
    """Where the data of an input with parameters are."""
    datatype = _datatype(tensor)
    fields = {"data": tensor.data is not msgspec.UNSET}
    fields |= {name: name in tensor.parameters for name in ("binary_data_size", "shared_memory_region")}
    if sum(fields.values()) > 1:
        raise InvalidArgument(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But input '{tensor.name}' has several"
        )
    if fields["binary_data_size"]:
        size = _binary_size(tensor, datatype)
        plan.raw.append(RawInput(tensor.name, datatype, tensor.shape, plan.size, plan.size + size))
        plan.size += size
    elif fields["shared_memory_region"]:
        place = _place(f"input '{tensor.name}'", tensor.parameters)
        plan.shared.append((tensor.name, datatype, tensor.shape, place))
    else:
        plan.arrays[tensor.name] = _from_json(tensor)


def _check_names(names: Iterable[str]) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise InvalidArgument(f"input '{name}' already exists in request")
        seen.add(name)


def _datatype(tensor: WireInput) -> DataType:
    datatype = _DATATYPES.get(tensor.datatype)
    if datatype is None:
        raise InvalidArgument(f"invalid datatype for input {tensor.name}: '{tensor.datatype}'")
    return datatype


def _from_json(tensor: WireInput) -> Array:
    if type(tensor) is _FloatInput:
        values, is_checked = tensor.data, True
    else:
        _datatype(tensor)
        values, is_checked = tensor.data, False
    if values is msgspec.UNSET:
        raise InvalidArgument(f"input '{tensor.name}' has no data")
    return from_json(tensor.name, tensor.datatype, tensor.shape, values, is_checked)


def _binary_size(tensor: WireInput, datatype: DataType) -> int:
    size = _size(f"input '{tensor.name}'", tensor.parameters, "binary_data_size")
    expected = math.prod(tensor.shape) * datatype.itemsize
    if datatype.itemsize and size != expected:
        raise InvalidArgument(
            f"input '{tensor.name}': shape {tensor.shape} of {tensor.datatype} takes {expected} bytes, "
            f"but 'binary_data_size' is {size}"
        )
    return size


def _place(what: str, parameters: Parameters) -> Place:
    region = parameters["shared_memory_region"]
    if not isinstance(region, str):
        raise InvalidArgument(f"{what}: 'shared_memory_region' must be a name, not {region!r}")
    size = _size(what, parameters, "shared_memory_byte_size")
    return Place(region, _size(what, parameters, "shared_memory_offset", 0), size)


def _size(what: str, parameters: Parameters, name: str, default: int | None = None) -> int:
    size = parameters.get(name, default)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise InvalidArgument(f"{what}: '{name}' must be a number of bytes, not {size!r}")
    return size


def _note_outputs(plan: RequestLayout, wire: WireRequest) -> None:
    """Which outputs are wanted, and in which form: each one's own wish goes before the request's."""
    default = ALL if _flag(plan.parameters, "binary_data_output") else NONE
    plan.parameters.pop("binary_data_output", None)
    if not wire.outputs:
        plan.form = BINARY if default is ALL else TEXT
        return
    plan.outputs = tuple(output.name for output in wire.outputs)
    if len(set(plan.outputs)) != len(plan.outputs):
        raise InvalidArgument("an output is requested twice")
    classification: dict[str, int] = {}
    placed: dict[str, Place] = {}
    binary = []
    for output in wire.outputs:
        if count := _size(f"output '{output.name}'", output.parameters, "classification", 0):
            classification[output.name] = count
        if "shared_memory_region" in output.parameters:
            placed[output.name] = _place(f"output '{output.name}'", output.parameters)
            if count:
                raise InvalidArgument(f"shared memory can't be used for output '{output.name}' with classification")
        elif _flag(output.parameters, "binary_data", output.name in default):
            binary.append(output.name)
    plan.placed = placed
    plan.form = AnswerForm(_among(binary, plan.outputs), classification)


def _among(binary: list[str], outputs: tuple[str, ...]) -> Container[str]:
    """``binary`` as a container; all or none are told apart by identity."""
    if not binary:
        return NONE
    return ALL if len(binary) == len(outputs) else frozenset(binary)


def _flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidArgument(f"'{name}' must be true or false, not {value!r}")
    return value
