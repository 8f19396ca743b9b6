"""Requests as the Open Inference Protocol writes them over HTTP: JSON and the binary tensor data extension. Free of sockets.

A binary body is a JSON part, whose length stands in a header, and then the raw tensors of those inputs that carry
``binary_data_size``, in order. Arrays decoded from it are views of the received buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from penstock.errors import InvalidArgument
from penstock.online.server.answer_form import ALL, BINARY, NONE, TEXT, AnswerForm
from penstock.online.server.json_tensor import from_json
from penstock.online.server.shared_memory import Lease, SharedMemory
from penstock.request import InferRequest
from penstock.tensor import Array, DataType, TensorSpec, from_wire

Body = bytes | bytearray
Parameters = dict[str, bool | int | float | str]
InputsOf = Callable[[str, str], Sequence[TensorSpec]]
"""The inputs of a model, by its name and version. Raises NotFound."""

_MAX_RANK = 32
_MAX_CACHED = 1024
_MAX_PLAN_BYTES = 4096


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


class _Raw(msgspec.Struct, frozen=True):
    """An input whose elements follow the JSON, from ``start`` to ``end`` counted from there."""

    name: str
    datatype: DataType
    shape: list[int]
    start: int
    end: int


class _Shared(msgspec.Struct, frozen=True):
    """A place in shared memory."""

    region: str
    offset: int
    byte_size: int


class _Plan(msgspec.Struct):
    """A JSON part understood: all of a request but its raw tensors."""

    id: str
    arrays: dict[str, Array]
    """The inputs whose data are in the JSON."""
    parameters: Parameters
    raw: list[_Raw] = []
    size: int = 0
    """Bytes of all raw tensors."""
    shared: list[tuple[str, DataType, list[int], _Shared]] = []
    """The inputs that are in shared memory."""
    outputs: tuple[str, ...] = ()
    form: AnswerForm = TEXT
    """But for what goes into shared memory."""
    placed: dict[str, _Shared] = {}


_DATATYPES = {datatype.value: datatype for datatype in DataType}
_parameters = attrgetter("parameters")
_decode_request = msgspec.json.Decoder(_Request).decode
_decode_floats = msgspec.json.Decoder(_FloatRequest).decode


class RequestDecoder:
    """Reads requests; remembers the JSON parts that clients send before their raw tensors again and again.

    Belongs to the event loop.
    """

    def __init__(self, shared_memory: SharedMemory, inputs_of: InputsOf) -> None:
        self._shared_memory = shared_memory
        self._inputs_of = inputs_of
        self._plans: dict[bytes, _Plan] = {}

    def __call__(
        self, model_name: str, model_version: str, body: Body, json_length: int | None
    ) -> tuple[InferRequest, AnswerForm]:
        """The request in ``body``, and the form of its answer, which holds the shared memory that the request uses.

        ``json_length`` is the header ``Inference-Header-Content-Length``, or None without it. Raises InvalidArgument,
        NotFound, Unsupported.
        """
        if json_length is None:
            wire = _read(body)
            if not (wire.parameters or wire.outputs or any(map(_parameters, wire.inputs))):
                return InferRequest(model_name, _plain_inputs(wire.inputs), model_version, wire.id), TEXT
            plan = _understand(wire)
            if plan.raw:
                raise InvalidArgument("'binary_data_size' is given, but not the header Inference-Header-Content-Length")
            inputs = plan.arrays
        elif json_length == 0:
            return self._raw_request(model_name, model_version, body), BINARY
        else:
            plan = self._plan(body, json_length)
            inputs = plan.arrays.copy()
            if json_length + plan.size != len(body):
                _explain_size(model_name, plan, len(body) - json_length)
            for raw in plan.raw:
                if raw.start != raw.end and raw.datatype.itemsize > 1:
                    inputs[raw.name] = np.ndarray(raw.shape, raw.datatype.dtype, body, json_length + raw.start)
                else:
                    part = memoryview(body)[json_length + raw.start : json_length + raw.end]
                    inputs[raw.name] = from_wire(part, raw.datatype, raw.shape)
        form = plan.form
        if plan.shared or plan.placed:
            form = self._lease(plan, inputs)
        return InferRequest(model_name, inputs, model_version, plan.id, plan.outputs, plan.parameters), form

    def _plan(self, body: Body, json_length: int) -> _Plan:
        if json_length > len(body):
            raise InvalidArgument(f"the JSON part is said to have {json_length} bytes, but the body has {len(body)}")
        text = bytes(memoryview(body)[:json_length])
        plan = self._plans.get(text)
        if plan is None:
            plan = _understand(_read(text))
            if json_length <= _MAX_PLAN_BYTES:
                if len(self._plans) >= _MAX_CACHED:
                    self._plans.clear()
                self._plans[text] = plan
        return plan

    def _lease(self, plan: _Plan, inputs: dict[str, Array]) -> AnswerForm:
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

    def _raw_request(self, model_name: str, model_version: str, body: Body) -> InferRequest:
        """A body that is the model's only input."""
        specs = self._inputs_of(model_name, model_version)
        if len(specs) != 1:
            raise InvalidArgument(
                f"a raw binary request is for models with 1 input, and model '{model_name}' has {len(specs)}",
                "describe the inputs in JSON",
            )
        (spec,) = specs
        return InferRequest(model_name, {spec.name: _whole_body(spec, body)}, model_version)


def _whole_body(spec: TensorSpec, body: Body) -> Array:
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


def _leased(lease: Lease, name: str, datatype: DataType, shape: list[int], place: _Shared) -> Array:
    expected = math.prod(shape) * datatype.itemsize
    if datatype.itemsize and place.byte_size != expected:
        raise InvalidArgument(
            f"input '{name}': shape {shape} of {datatype.value} takes {expected} bytes, "
            f"but 'shared_memory_byte_size' is {place.byte_size}"
        )
    return lease.array(place.region, place.offset, place.byte_size, datatype, shape)


def _explain_size(model_name: str, plan: _Plan, size: int) -> None:
    for raw in plan.raw:
        if raw.end > size:
            raise InvalidArgument(
                f"unexpected size for input '{raw.name}', expecting {raw.end - size} additional bytes "
                f"for model '{model_name}'"
            )
    raise InvalidArgument(
        f"unexpected additional input data for model '{model_name}': {size - plan.size} bytes are left over"
    )


def _read(text: Body) -> _Request:
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not an inference request: {error}") from None
    except RecursionError:
        raise InvalidArgument("the body's JSON is nested too deeply") from None


def _plain_inputs(tensors: Sequence[_Input]) -> dict[str, Array]:
    """Inputs without parameters."""
    inputs: dict[str, Array] = {}
    for tensor in tensors:
        inputs[tensor.name] = _from_json(tensor)
    if len(inputs) < len(tensors):
        _check_names(tensor.name for tensor in tensors)
    return inputs


def _understand(wire: _Request) -> _Plan:
    """Everything that can be known from the JSON alone."""
    plan = _Plan(wire.id, _plain_inputs([tensor for tensor in wire.inputs if not tensor.parameters]), wire.parameters)
    for tensor in wire.inputs:
        if tensor.parameters:
            _note_input(plan, tensor)
    _check_names(tensor.name for tensor in wire.inputs)
    _note_outputs(plan, wire)
    return plan


def _decode(text: Body) -> _Request:
    if b'"FP' in text:
        try:
            return _decode_floats(text)
        except msgspec.ValidationError:
            pass  # nested, or of other datatypes too, or wrong, which the general form tells better
    return _decode_request(text)


def _note_input(plan: _Plan, tensor: _Input) -> None:
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
        plan.raw.append(_Raw(tensor.name, datatype, tensor.shape, plan.size, plan.size + size))
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


def _datatype(tensor: _Input) -> DataType:
    datatype = _DATATYPES.get(tensor.datatype)
    if datatype is None:
        raise InvalidArgument(f"invalid datatype for input {tensor.name}: '{tensor.datatype}'")
    return datatype


def _from_json(tensor: _Input) -> Array:
    if type(tensor) is _FloatInput:
        values, is_checked = tensor.data, True
    else:
        _datatype(tensor)
        values, is_checked = tensor.data, False
    if values is msgspec.UNSET:
        raise InvalidArgument(f"input '{tensor.name}' has no data")
    return from_json(tensor.name, tensor.datatype, tensor.shape, values, is_checked)


def _binary_size(tensor: _Input, datatype: DataType) -> int:
    size = _size(f"input '{tensor.name}'", tensor.parameters, "binary_data_size")
    expected = math.prod(tensor.shape) * datatype.itemsize
    if datatype.itemsize and size != expected:
        raise InvalidArgument(
            f"input '{tensor.name}': shape {tensor.shape} of {tensor.datatype} takes {expected} bytes, "
            f"but 'binary_data_size' is {size}"
        )
    return size


def _place(what: str, parameters: Parameters) -> _Shared:
    region = parameters["shared_memory_region"]
    if not isinstance(region, str):
        raise InvalidArgument(f"{what}: 'shared_memory_region' must be a name, not {region!r}")
    size = _size(what, parameters, "shared_memory_byte_size")
    return _Shared(region, _size(what, parameters, "shared_memory_offset", 0), size)


def _size(what: str, parameters: Parameters, name: str, default: int | None = None) -> int:
    size = parameters.get(name, default)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise InvalidArgument(f"{what}: '{name}' must be a number of bytes, not {size!r}")
    return size


def _note_outputs(plan: _Plan, wire: _Request) -> None:
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
    placed: dict[str, _Shared] = {}
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
