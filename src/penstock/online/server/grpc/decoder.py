"""The Open Inference Protocol's wire form over gRPC: ``ModelInferRequest`` in. Free of sockets.

A message is taken apart by hand (``grpc/request_wire.py``); its raw tensors become views of the received buffer. The rest but
the id is the same in one request after the other, and is understood once, by the protobuf class. Where everything lies is
remembered, too, so that a message like the one before is not even walked.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from penstock.errors import InvalidArgument
from penstock.online.server.answer_form import TEXT, AnswerForm
from penstock.online.server.grpc.request_wire import Parts, between, split
from penstock.online.server.shared_memory.registry import Lease, SharedMemory
from penstock.protocol import messages
from penstock.protocol.messages import Message
from penstock.request import MAX_PARAMETERS, InferRequest, Parameters, check_bytes_elements
from penstock.tensor import Array, Buffer, DataType, element_count, from_wire

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_MAX_CACHED = 1024
_MAX_PLAN_BYTES = 2048
_MAX_UNUSUAL_BYTES = 1 << 20
"""Most bytes that the protobuf class is given uncounted."""

_VERSION = re.compile(r"[0-9]{1,18}")

_CONTENTS = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
    DataType.BYTES: "bytes_contents",
}
"""The one field of InferTensorContents for a datatype; FP16 and BF16 have none."""
_AS_IN_MEMORY = frozenset({DataType.BOOL, DataType.FP32, DataType.FP64})
"""Those whose elements lie in the message as in memory."""
_VARIABLE = -1
"""Stands for the size of a BYTES tensor."""
_DATATYPES = {datatype.value: datatype for datatype in DataType}


class _Region(NamedTuple):
    """Where in shared memory a tensor lies."""

    name: str
    offset: int
    byte_size: int


class _Input(NamedTuple):
    name: str
    datatype: DataType
    shape: tuple[int, ...]
    size_bytes: int
    """Of its raw form."""


class _Plan(msgspec.Struct):
    """A request understood: all of it but its id and its raw tensors."""

    model_name: str
    model_version: str
    raw: list[_Input] = []
    """Those whose elements are in ``raw_input_contents``, in that order."""
    arrays: dict[str, Array] = {}
    """From typed contents."""
    shared: list[tuple[_Input, _Region]] = []
    parameters: Parameters = {}
    outputs: tuple[str, ...] = ()
    placed: list[tuple[str, _Region]] = []
    """Outputs that go into shared memory."""
    form: AnswerForm = TEXT
    """But for what lies in shared memory, which is leased for each request anew."""


class _Layout(msgspec.Struct):
    """Where things are in messages of one length that differ in nothing but id and raw tensors."""

    fixed: list[tuple[int, int, bytes]]
    """What else there is: from where, to where, and what."""
    parts: Parts
    plan: _Plan


class GrpcRequestDecoder:
    """Reads requests; remembers what clients send again and again but for ids and tensors. Belongs to the event loop."""

    def __init__(self, shared_memory: SharedMemory) -> None:
        self._shared_memory = shared_memory
        self._plans: dict[bytes, _Plan] = {}
        self._layouts: dict[int, _Layout] = {}

    def __call__(self, data: Buffer) -> tuple[InferRequest, AnswerForm]:
        """The request in ``data``, a serialized ModelInferRequest, and the form of its answer, which holds the shared memory
        that the request uses.

        Numeric raw tensors are views of ``data``; parameters may be shared with other requests. Raises InvalidArgument,
        NotFound, Unsupported.
        """
        layout = self._layouts.get(len(data))
        if layout is not None:
            for start, end, fixed in layout.fixed:
                if data[start:end] != fixed:
                    layout = None
                    break
        if layout is None:
            layout, data = self._lay_out(data)
        plan = layout.plan
        inputs = plan.arrays.copy()
        for tensor, (start, end) in zip(plan.raw, layout.parts.raw, strict=True):
            inputs[tensor.name] = _array(plan, tensor, data, start, end)
        identity = _text(data, layout.parts.identity)
        form = self._lease(plan, inputs) if plan.shared or plan.placed else plan.form
        outputs, parameters = plan.outputs, plan.parameters
        return InferRequest(plan.model_name, inputs, plan.model_version, identity, outputs, parameters), form

    def _lay_out(self, data: Buffer) -> tuple[_Layout, Buffer]:
        """How ``data`` is laid out, or the plain message that says the same."""
        parts = split(data)
        if parts is None:
            data = _rewrite(data)
            parts = split(data)
            assert parts is not None, "protobuf writes plain messages"
        rest, raw = parts.rest, parts.raw
        plan = self._plans.get(rest)
        is_known = plan is not None
        if plan is None:
            plan = _understand(_parse(rest), bool(raw))
            # Typed contents differ from one request to the next.
            is_known = len(rest) <= _MAX_PLAN_BYTES and not plan.arrays
            if is_known:
                _remember(self._plans, rest, plan)
        if len(raw) != len(plan.raw):
            raise InvalidArgument(
                f"the number of inputs ({len(plan.raw)}) does not match the number of raw_input_contents ({len(raw)}) "
                f"for model '{plan.model_name}'",
                "one for each input that is not in shared memory, or typed contents for each",
            )
        layout = _Layout(between(data, sorted([*raw, parts.identity])), parts, plan)
        if is_known:
            _remember(self._layouts, len(data), layout)
        return layout, data

    def _lease(self, plan: _Plan, inputs: dict[str, Array]) -> AnswerForm:
        """Add the inputs in shared memory, and say where outputs go."""
        lease = self._shared_memory.lease()
        try:
            for tensor, region in plan.shared:
                inputs[tensor.name] = _leased(lease, plan, tensor, region)
            placements = {name: lease.place(*region) for name, region in plan.placed}
        except BaseException:
            lease.release()
            raise
        return AnswerForm(classification=plan.form.classification, placements=placements, lease=lease)


def request_id(data: Buffer) -> str:
    """The id in a ModelInferRequest that was refused; empty if there is none to be found."""
    try:
        parts = split(data)
        return _text(data, parts.identity) if parts is not None else ""
    except InvalidArgument:
        return ""


def check_version(model_name: str, version: str) -> str:
    """``version`` as it came. Raises InvalidArgument if it is neither empty nor a number."""
    if version and not _VERSION.fullmatch(version):
        raise InvalidArgument(
            f"failed to get model version from specified version string '{version}' of model '{model_name}'",
            "version should be an integral value > 0",
        )
    return version


def _parse(data: Buffer) -> Message:
    try:
        return messages.ModelInferRequest.FromString(bytes(data))
    except DecodeError as error:
        raise InvalidArgument(f"the message is not a ModelInferRequest: {error}") from None


def _rewrite(data: Buffer) -> bytes:
    """The plain message that says what ``data`` says in an unusual way."""
    if len(data) > _MAX_UNUSUAL_BYTES:
        raise InvalidArgument("the message is not a ModelInferRequest")
    message = _parse(data)
    message.DiscardUnknownFields()
    return bytes(message.SerializeToString())


def _text(data: Buffer, span: tuple[int, int]) -> str:
    start, end = span
    if start == end:
        return ""
    try:
        return str(data[start:end], "utf-8")
    except UnicodeDecodeError:
        raise InvalidArgument("the message is not a ModelInferRequest: its id is not UTF-8") from None


def _remember(memory: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    if len(memory) >= _MAX_CACHED:
        memory.clear()
    memory[key] = value


def _understand(message: Message, has_raw: bool) -> _Plan:
    """Everything that can be known without the raw tensors but that there are some."""
    plan = _Plan(message.model_name, check_version(message.model_name, message.model_version))
    plan.parameters = _values(message.parameters)
    check_bytes_elements(sum(element_count(one.shape) for one in message.inputs if one.datatype == "BYTES"))
    names = set()
    for tensor in message.inputs:
        if tensor.name in names:
            raise InvalidArgument(f"input '{tensor.name}' already exists in request")
        names.add(tensor.name)
        _note_input(plan, tensor, has_raw)
    plan.outputs = tuple(output.name for output in message.outputs)
    if len(set(plan.outputs)) != len(plan.outputs):
        raise InvalidArgument("an output is requested twice")
    classification: dict[str, int] = {}
    for output in message.outputs:
        if output.parameters:
            _note_output(plan, output, classification)
    if classification:
        plan.form = AnswerForm(classification=classification)
    return plan


def _note_input(plan: _Plan, tensor: Message, has_raw: bool) -> None:
    datatype = _DATATYPES.get(tensor.datatype)
    if datatype is None:
        raise InvalidArgument(f"invalid datatype for input {tensor.name}: '{tensor.datatype}'")
    count = element_count(tensor.shape)
    noted = _Input(
        tensor.name, datatype, tuple(tensor.shape), count * datatype.itemsize if datatype.itemsize else _VARIABLE
    )
    region = _region(f"input '{tensor.name}'", _values(tensor.parameters)) if tensor.parameters else None
    if tensor.HasField("contents"):
        if region is not None:
            raise InvalidArgument(
                f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' "
                f"for model '{plan.model_name}'"
            )
        if has_raw:
            raise InvalidArgument(
                f"contents field must not be specified when using raw_input_contents for '{tensor.name}' "
                f"for model '{plan.model_name}'",
                "send all inputs raw, or all as typed contents",
            )
        plan.arrays[tensor.name] = _from_contents(plan, noted, tensor.contents, count)
    elif region is not None:
        plan.shared.append((noted, region))
    else:
        plan.raw.append(noted)


def _note_output(plan: _Plan, output: Message, classification: dict[str, int]) -> None:
    what, parameters = f"output '{output.name}'", _values(output.parameters)
    region = _region(what, parameters)
    if region is not None:
        plan.placed.append((output.name, region))
    if "classification" in parameters:
        count = _whole_number(what, parameters, "classification")
        if not count:
            raise InvalidArgument(f"{what}: 'classification' must be at least 1")
        if region is not None:
            raise InvalidArgument(f"shared memory can't be used for {what} with classification")
        classification[output.name] = count


def _region(what: str, parameters: Parameters) -> _Region | None:
    """Where in shared memory an input or output lies; None if it does not."""
    name = parameters.get("shared_memory_region")
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidArgument(f"{what}: 'shared_memory_region' must be a name, not {name!r}")
    size = _whole_number(what, parameters, "shared_memory_byte_size")
    return _Region(name, _whole_number(what, parameters, "shared_memory_offset", 0), size)


def _whole_number(what: str, parameters: Parameters, name: str, default: int | None = None) -> int:
    number = parameters.get(name, default)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise InvalidArgument(f"{what}: '{name}' must be a whole number, not {number!r}")
    return number


def _values(parameters: Any) -> Parameters:
    """Parameters as Python's own values. Raises InvalidArgument, also if there are more than anybody needs."""
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidArgument(f"{len(parameters)} parameters are more than the {MAX_PARAMETERS} that are taken")
    found = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidArgument(
                f"parameter '{name}' has invalid type. It should be either 'int', 'bool', 'double', or 'string'."
            )
        found[name] = getattr(parameter, choice)
    return found


def _from_contents(plan: _Plan, tensor: _Input, contents: Message, count: int) -> Array:
    datatype, expected = tensor.datatype, _CONTENTS.get(tensor.datatype)
    if expected is None:
        raise InvalidArgument(
            f"input '{tensor.name}': {datatype.value} has no typed contents", "send it in 'raw_input_contents'"
        )
    for field, _ in contents.ListFields():
        if field.name != expected:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{plan.model_name}': "
                f"'{field.name}', expected '{expected}' for datatype '{datatype.value}'"
            )
    values = getattr(contents, expected)
    # Before anything of the declared shape is made: the count is what the message really holds.
    if len(values) != count:
        raise InvalidArgument(
            f"input '{tensor.name}' of shape {list(tensor.shape)} for model '{plan.model_name}' needs {count} elements, "
            f"but '{expected}' has {len(values)}"
        )
    if datatype is DataType.BYTES:
        array = np.empty(count, np.object_)
        array[:] = list(values)
        return array.reshape(tensor.shape)
    if datatype in _AS_IN_MEMORY and count:
        # A hundred times as fast as one element after the other: the elements end the message. Unknown fields would come after.
        contents.DiscardUnknownFields()
        data = contents.SerializeToString()
        return np.ndarray(tensor.shape, datatype.dtype, data, len(data) - tensor.size_bytes)
    try:
        return np.fromiter(values, datatype.dtype, count).reshape(tensor.shape)
    except OverflowError as error:
        raise InvalidArgument(f"the data of input '{tensor.name}' do not fit {datatype.value}: {error}") from None


def _array(plan: _Plan, tensor: _Input, data: Buffer, start: int, end: int) -> Array:
    """The raw tensor from ``start`` to ``end`` of ``data``."""
    size_bytes = tensor.size_bytes
    if size_bytes == end - start and size_bytes and tensor.datatype is not DataType.BOOL:
        return np.ndarray(tensor.shape, tensor.datatype.dtype, data, start)
    if size_bytes not in (_VARIABLE, end - start):
        raise InvalidArgument(
            f"input byte size mismatch for input '{tensor.name}' for model '{plan.model_name}'. "
            f"Expected {size_bytes}, got {end - start}"
        )
    try:
        return from_wire(memoryview(data)[start:end], tensor.datatype, tensor.shape)
    except InvalidArgument as error:
        raise InvalidArgument(f"input '{tensor.name}' for model '{plan.model_name}': {error.message}") from None


def _leased(lease: Lease, plan: _Plan, tensor: _Input, region: _Region) -> Array:
    if tensor.size_bytes not in (_VARIABLE, region.byte_size):
        raise InvalidArgument(
            f"input byte size mismatch for input '{tensor.name}' for model '{plan.model_name}'. "
            f"Expected {tensor.size_bytes}, got {region.byte_size} in shared memory"
        )
    return lease.array(*region, tensor.datatype, tensor.shape)
