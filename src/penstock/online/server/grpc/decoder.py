"""Decodes ``ModelInferRequest`` of the Open Inference Protocol. Knows no sockets.

``grpc/request_wire.py`` takes a message apart; raw tensors become views of the received buffer. A client's requests usually differ
only in the id and the tensors, so the protobuf class parses the rest once. The decoder also remembers the positions, and does not
walk a message that is laid out like an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from penstock.errors import InvalidArgument
from penstock.online.server.answer_form import AnswerForm
from penstock.online.server.grpc.request_wire import Parts, between, split
from penstock.online.server.request_layout import (
    VARIABLE,
    BoundedCache,
    RequestLayout,
    TensorLayout,
    check_names,
    find_datatype,
    read_slice,
    whole_number,
)
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.protocol import messages
from penstock.protocol.messages import Message
from penstock.request import MAX_PARAMETERS, InferRequest, Parameters, check_bytes_elements
from penstock.tensor import Array, Buffer, DataType, element_count, from_wire

_MAX_KNOWN_BYTES = 2048
_MAX_UNUSUAL_BYTES = 1 << 20
"""Maximum bytes of a message in an unusual form, which the protobuf class parses whole."""

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
"""Datatypes with the same bytes in a message as in memory."""


class _GrpcLayout(RequestLayout):
    """A request without its id and its raw tensors."""

    model_name: str = ""
    model_version: str = ""
    raw: list[TensorLayout] = []
    """The inputs with elements in ``raw_input_contents``, in that order."""


class _Message(msgspec.Struct):
    """Messages of one length that differ only in id and raw tensors."""

    fixed: list[tuple[int, int, bytes]]
    """Start, end and bytes of each part that is always the same."""
    parts: Parts
    layout: _GrpcLayout


class GrpcRequestDecoder:
    """Decodes requests; remembers everything that clients repeat. Belongs to the event loop."""

    def __init__(self, shared_memory: SharedMemory) -> None:
        self._shared_memory = shared_memory
        self._known = BoundedCache[bytes, _GrpcLayout]()
        self._messages = BoundedCache[int, _Message]()

    def __call__(self, data: Buffer) -> tuple[InferRequest, AnswerForm]:
        """The request in ``data``, a serialized ModelInferRequest, and the form of its answer.

        The form holds a lease of the request's shared memory until it is released. Numeric raw tensors are views of ``data``;
        parameters may be shared with other requests. Raises InvalidArgument, NotFound, Unsupported.
        """
        message = self._messages.get(len(data))
        if message is not None:
            for start, end, fixed in message.fixed:
                if data[start:end] != fixed:
                    message = None
                    break
        if message is None:
            message, data = self._take_apart(data)
        layout = message.layout
        model_name, inputs = layout.model_name, layout.arrays.copy()
        for tensor, (start, end) in zip(layout.raw, message.parts.raw, strict=True):
            inputs[tensor.name] = _array(model_name, tensor, data, start, end)
        identity = _text(data, message.parts.identity)
        form = layout.lease(self._shared_memory, model_name, inputs)
        outputs, parameters = layout.outputs, layout.parameters
        return InferRequest(model_name, inputs, layout.model_version, identity, outputs, parameters), form

    def _take_apart(self, data: Buffer) -> tuple[_Message, Buffer]:
        """The positions in ``data``, with ``data`` itself or, if its form is unusual, the equivalent plain message."""
        parts = split(data)
        if parts is None:
            data = _rewrite(data)
            parts = split(data)
            assert parts is not None, "protobuf writes plain messages"
        rest, raw = parts.rest, parts.raw
        layout = self._known.get(rest)
        is_known = layout is not None
        if layout is None:
            layout = _layout(_parse(rest), bool(raw))
            # Typed contents are part of the rest, and differ in every request.
            is_known = len(rest) <= _MAX_KNOWN_BYTES and not layout.arrays
            if is_known:
                self._known.remember(rest, layout)
        if len(raw) != len(layout.raw):
            raise InvalidArgument(
                f"the number of inputs ({len(layout.raw)}) does not match the number of raw_input_contents ({len(raw)}) "
                f"for model '{layout.model_name}'",
                "one for each input that is not in shared memory, or typed contents for each",
            )
        message = _Message(between(data, sorted([*raw, parts.identity])), parts, layout)
        if is_known:
            self._messages.remember(len(data), message)
        return message, data


def request_id(data: Buffer) -> str:
    """The id in a ModelInferRequest that was refused; empty if it has none or cannot be read."""
    try:
        parts = split(data)
        return _text(data, parts.identity) if parts is not None else ""
    except InvalidArgument:
        return ""


def check_version(model_name: str, version: str) -> str:
    """``version`` unchanged. Raises InvalidArgument if it is neither empty nor a number."""
    if version and not _VERSION.fullmatch(version):
        raise InvalidArgument(
            f"failed to get model version from specified version string '{version}' of model '{model_name}'",
            "version should be an integral value > 0",
        )
    return version


def parameter_values(parameters: Mapping[str, Any]) -> Parameters:
    """Protobuf parameters as Python values. Raises InvalidArgument if one has no value."""
    found = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidArgument(
                f"parameter '{name}' has invalid type. It should be either 'int', 'bool', 'double', or 'string'."
            )
        found[name] = getattr(parameter, choice)
    return found


def _parse(data: Buffer) -> Message:
    try:
        return messages.ModelInferRequest.FromString(bytes(data))
    except DecodeError as error:
        raise InvalidArgument(f"the message is not a ModelInferRequest: {error}") from None


def _rewrite(data: Buffer) -> bytes:
    """The plain message that is equivalent to ``data``, whose form is unusual."""
    if len(data) > _MAX_UNUSUAL_BYTES:
        raise InvalidArgument(f"the message of {len(data)} bytes is not a ModelInferRequest")
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


def _layout(message: Message, has_raw: bool) -> _GrpcLayout:
    """The layout of a message without its raw tensors; ``has_raw``: it had some."""
    version = check_version(message.model_name, message.model_version)
    layout = _GrpcLayout(parameters=_values(message.parameters), model_name=message.model_name, model_version=version)
    check_bytes_elements(sum(element_count(one.shape) for one in message.inputs if one.datatype == "BYTES"))
    check_names(tensor.name for tensor in message.inputs)
    for tensor in message.inputs:
        _note_input(layout, tensor, has_raw)
    layout.note_outputs(output.name for output in message.outputs)
    classification: dict[str, int] = {}
    for output in message.outputs:
        if output.parameters:
            _note_output(layout, output, classification)
    if classification:
        layout.form = AnswerForm(classification=classification)
    return layout


def _note_input(layout: _GrpcLayout, tensor: Message, has_raw: bool) -> None:
    datatype, count = find_datatype(tensor.name, tensor.datatype), element_count(tensor.shape)
    size = count * datatype.itemsize if datatype.itemsize else VARIABLE
    noted = TensorLayout(tensor.name, datatype, tuple(tensor.shape), size)
    part = read_slice(f"input '{tensor.name}'", _values(tensor.parameters)) if tensor.parameters else None
    if tensor.HasField("contents"):
        if part is not None:
            raise InvalidArgument(
                f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' "
                f"for model '{layout.model_name}'"
            )
        if has_raw:
            raise InvalidArgument(
                f"contents field must not be specified when using raw_input_contents for '{tensor.name}' "
                f"for model '{layout.model_name}'",
                "send all inputs raw, or all as typed contents",
            )
        layout.arrays[tensor.name] = _from_contents(layout.model_name, noted, tensor.contents, count)
    elif part is not None:
        layout.shared.append((noted, part))
    else:
        layout.raw.append(noted)


def _note_output(layout: _GrpcLayout, output: Message, classification: dict[str, int]) -> None:
    what, parameters = f"output '{output.name}'", _values(output.parameters)
    if "classification" in parameters:
        count = whole_number(what, parameters, "classification")
        if not count:
            raise InvalidArgument(f"{what}: 'classification' must be at least 1, got {count}")
        classification[output.name] = count
    part = read_slice(what, parameters)
    if part is not None:
        layout.note_place(output.name, part, output.name in classification)


def _values(parameters: Any) -> Parameters:
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidArgument(f"{len(parameters)} parameters exceed the limit of {MAX_PARAMETERS}")
    return parameter_values(parameters)


def _from_contents(model_name: str, tensor: TensorLayout, contents: Message, count: int) -> Array:
    datatype, expected = tensor.datatype, _CONTENTS.get(tensor.datatype)
    if expected is None:
        raise InvalidArgument(
            f"input '{tensor.name}': {datatype.value} has no typed contents", "send it in 'raw_input_contents'"
        )
    for field, _ in contents.ListFields():
        if field.name != expected:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{model_name}': "
                f"'{field.name}', expected '{expected}' for datatype '{datatype.value}'"
            )
    values = getattr(contents, expected)
    # Checked before memory is allocated for the declared shape.
    if len(values) != count:
        raise InvalidArgument(
            f"input '{tensor.name}' of shape {list(tensor.shape)} for model '{model_name}' needs {count} elements, "
            f"but '{expected}' has {len(values)}"
        )
    if datatype is DataType.BYTES:
        array = np.empty(count, np.object_)
        array[:] = list(values)
        return array.reshape(tensor.shape)
    if datatype in _AS_IN_MEMORY and count:
        # The elements end the message, unless unknown fields follow; a view of them is 100 times as fast as a loop.
        contents.DiscardUnknownFields()
        data = contents.SerializeToString()
        return np.ndarray(tensor.shape, datatype.dtype, data, len(data) - tensor.size_bytes)
    try:
        return np.fromiter(values, datatype.dtype, count).reshape(tensor.shape)
    except OverflowError as error:
        raise InvalidArgument(f"the data of input '{tensor.name}' do not fit {datatype.value}: {error}") from None


def _array(model_name: str, tensor: TensorLayout, data: Buffer, start: int, end: int) -> Array:
    """The raw tensor in ``data[start:end]``."""
    size_bytes = tensor.size_bytes
    if size_bytes == end - start and size_bytes and tensor.datatype is not DataType.BOOL:
        return np.ndarray(tensor.shape, tensor.datatype.dtype, data, start)
    if size_bytes not in (VARIABLE, end - start):
        raise InvalidArgument(
            f"input byte size mismatch for input '{tensor.name}' for model '{model_name}'. "
            f"Expected {size_bytes}, got {end - start}"
        )
    try:
        return from_wire(memoryview(data)[start:end], tensor.datatype, tensor.shape)
    except InvalidArgument as error:
        raise InvalidArgument(f"input '{tensor.name}' for model '{model_name}': {error.message}") from None
