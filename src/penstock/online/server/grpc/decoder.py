"""Decodes ``ModelInferRequest`` of the Open Inference Protocol. Independent of sockets.

``grpc/request_wire.py`` splits a message into parts. Raw tensors become views of the received buffer, and ``grpc/contents.py``
decodes typed contents. A client's requests usually differ only in the id and the tensors, so the protobuf class parses all other
fields once. The decoder also caches the positions of the parts, and does not split a message with the same layout again.

Decoding has two steps: opening the message, and reading the tensors. Between the steps, the caller reserves memory for the
tensors. Both steps can run on another thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from penstock.errors import InvalidArgument
from penstock.online.server.answer_form import AnswerForm
from penstock.online.server.grpc.contents import decode_contents, decoded_bytes
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

INLINE_BYTES = 4096
"""Maximum number of bytes that the event loop examines one by one. Longer work runs on another thread."""
_INLINE_FIELDS = 64

_MAX_KNOWN_BYTES = 2048
_MAX_UNUSUAL_BYTES = 64 << 10
"""Maximum size of a message in an unusual form. The protobuf class parses such messages completely."""
_MAX_REST_BYTES = 1 << 20
"""Maximum size of the part of a request that the protobuf class parses: everything except the id and the tensors."""

_WALKED = frozenset({DataType.BOOL, DataType.BYTES})
"""Datatypes whose raw elements have to be examined one by one."""

_VERSION = re.compile(r"[0-9]{1,18}")


class _GrpcLayout(RequestLayout):
    """The layout of a gRPC request."""

    model_name: str = ""
    model_version: str = ""
    raw: list[TensorLayout] = []
    """The inputs with elements in ``raw_input_contents``, in the order of the elements."""
    typed: list[TensorLayout] = []
    """The inputs with typed contents, in order."""
    is_walked: bool = False
    """True if the elements of any input have to be examined one by one."""


class OpenedMessage(msgspec.Struct):
    """The positions of the parts in a message. Valid for all messages that differ only in the id and the tensors."""

    fixed: list[tuple[int, int, bytes]]
    """Start, end and content of each part that is the same in all these messages."""
    parts: Parts
    layout: _GrpcLayout
    work: int = 0
    """Number of bytes to examine when the tensors are decoded; 0 if all tensors are views of the message."""
    produced: int = 0
    """Bytes of memory for the tensors, in addition to the message."""
    views: list[tuple[str, Sequence[int], np.dtype[Any], int]] | None = None
    """Name, shape, type and start of each tensor if all of them are views of the message; else None."""

    def arrays(self, data: Buffer) -> dict[str, Array]:
        """The tensors in the message ``data``. May run on any thread. Raises InvalidArgument."""
        found: dict[str, Array] = {}
        if self.views is not None:
            for name, shape, dtype, start in self.views:
                found[name] = np.ndarray(shape, dtype, data, start)
            return found
        layout, parts = self.layout, self.parts
        for tensor, (start, end) in zip(layout.raw, parts.raw, strict=True):
            found[tensor.name] = _array(layout.model_name, tensor, data, start, end)
        if parts.contents:
            view = memoryview(data)
            for tensor, (start, end) in zip(layout.typed, parts.contents, strict=True):
                found[tensor.name] = decode_contents(layout.model_name, tensor, view[start:end])
        return found

    def outline(self, data: Buffer) -> InferRequest:
        """The request with placeholder arrays of the right datatypes and shapes, for a check before the tensors are decoded."""
        layout = self.layout
        tensors = [*layout.raw, *layout.typed, *(tensor for tensor, _ in layout.shared)]
        inputs: dict[str, Array] = {
            tensor.name: np.broadcast_to(np.zeros((), tensor.datatype.dtype), tensor.shape) for tensor in tensors
        }
        identity = _text(data, self.parts.identity)
        return InferRequest(layout.model_name, inputs, layout.model_version, identity, layout.outputs)


class GrpcRequestDecoder:
    """Decodes requests. Caches the parts that clients repeat. Used only on the event loop, except for ``open``."""

    def __init__(self, shared_memory: SharedMemory) -> None:
        self._shared_memory = shared_memory
        self._known = BoundedCache[bytes, _GrpcLayout]()
        self._messages = BoundedCache[int, OpenedMessage]()

    def __call__(self, data: Buffer) -> tuple[InferRequest, AnswerForm]:
        """Decode ``data``, a serialized ModelInferRequest of any size. Blocks. Returns the request, and the form of its response.

        Raises InvalidArgument, NotFound, Unsupported.
        """
        found = self.inline(data, lambda size: None)
        if found is None:
            opened, data = self.open(data)
            found = self.finish(opened, data, opened.arrays(data))
        return found

    def inline(self, data: Buffer, reserve: Callable[[int], object]) -> tuple[InferRequest, AnswerForm] | None:
        """The request in ``data``, and the form of its response. None if decoding would block the event loop for too long.

        Before decoding, ``reserve`` is called with the number of bytes of memory that decoding takes. Exceptions of ``reserve``
        propagate. Raises InvalidArgument, NotFound, Unsupported.
        """
        opened = self._messages.get(len(data))
        if opened is not None:
            for start, end, fixed in opened.fixed:
                if data[start:end] != fixed:
                    opened = None
                    break
        if opened is None:
            found = self._open_soon(data)
            if found is None:
                return None
            opened, data = found
        if opened.work:
            if opened.work > INLINE_BYTES:
                return None
            reserve(opened.produced)
        return self.finish(opened, data, opened.arrays(data))

    def _open_soon(self, data: Buffer) -> tuple[OpenedMessage, Buffer] | None:
        """Like ``open``, but returns None if opening may take long."""
        if len(data) <= INLINE_BYTES:
            return self.open(data)
        try:
            parts = split(data, _INLINE_FIELDS)
        except InvalidArgument:
            return None
        return None if parts is None or len(parts.rest) > INLINE_BYTES else (self._open(data, parts), data)

    def open(self, data: Buffer) -> tuple[OpenedMessage, Buffer]:
        """Open ``data``. Also returns ``data``, encoded again if its encoding is unusual. May run on any thread.

        Raises InvalidArgument.
        """
        parts = split(data)
        if parts is None:
            data = _rewrite(data)
            parts = split(data)
            assert parts is not None, "protobuf writes plain messages"
        return self._open(data, parts), data

    def finish(self, opened: OpenedMessage, data: Buffer, inputs: dict[str, Array]) -> tuple[InferRequest, AnswerForm]:
        """The request in ``data``, with ``inputs`` as its tensors, and the form of its response.

        The form of the response holds a lease on the request's shared memory, and must be released. Numeric raw tensors are views
        of ``data``. Requests may share one mapping of parameters. Raises InvalidArgument, NotFound, Unsupported.
        """
        layout, name = opened.layout, opened.layout.model_name
        identity = _text(data, opened.parts.identity)
        request = InferRequest(name, inputs, layout.model_version, identity, layout.outputs, layout.parameters)
        if not (layout.shared or layout.placed):
            return request, layout.form
        form = layout.lease(self._shared_memory, name, inputs)
        request.lease = form.lease
        return request, form

    def _open(self, data: Buffer, parts: Parts) -> OpenedMessage:
        rest, raw, contents = parts.rest, parts.raw, parts.contents
        layout = self._known.get(rest)
        is_known = layout is not None
        if layout is None:
            layout = _layout(_parse(rest))
            is_known = len(rest) <= _MAX_KNOWN_BYTES
            if is_known:
                self._known.remember(rest, layout)
        if raw and contents:
            raise InvalidArgument(
                f"contents field must not be specified when using raw_input_contents for '{layout.typed[0].name}' "
                f"for model '{layout.model_name}'",
                "send all inputs raw, or all as typed contents",
            )
        if len(raw) != len(layout.raw):
            raise InvalidArgument(
                f"the number of inputs ({len(layout.raw)}) does not match the number of raw_input_contents ({len(raw)}) "
                f"for model '{layout.model_name}'",
                "send one entry for each input outside shared memory, or send typed contents for each input",
            )
        opened = OpenedMessage([], parts, layout)
        spans = [*zip(layout.raw, raw, strict=True)]
        if not (contents or layout.typed) and all(_is_view(tensor, end - start) for tensor, (start, end) in spans):
            opened.views = [(tensor.name, tensor.shape, tensor.datatype.dtype, start) for tensor, (start, _) in spans]
        if layout.is_walked:
            pairs = chain(spans, zip(layout.typed, contents, strict=True))
            for tensor, (start, end) in pairs:
                if contents or tensor.datatype in _WALKED:
                    opened.work += end - start
                    opened.produced += decoded_bytes(tensor, end - start)
        if is_known:
            opened.fixed = between(data, sorted([*raw, *contents, parts.identity]))
            self._messages.remember(len(data), opened)
        return opened


def request_id(data: Buffer) -> str:
    """The id in a refused ModelInferRequest. Empty if the request has no id, or its id cannot be found quickly."""
    try:
        parts = split(data, _INLINE_FIELDS)
        return _text(data, parts.identity) if parts is not None else ""
    except InvalidArgument:
        return ""


def check_version(model_name: str, version: str) -> str:
    """``version`` unchanged. Raises InvalidArgument unless it is empty or a number."""
    if version and not _VERSION.fullmatch(version):
        raise InvalidArgument(
            f"failed to get model version from specified version string '{version}' of model '{model_name}'",
            "version should be an integral value > 0",
        )
    return version


def parameter_values(parameters: Mapping[str, Any]) -> Parameters:
    """Protobuf parameters as Python values. Raises InvalidArgument if a parameter has no value, or there are too many parameters."""
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidArgument(f"{len(parameters)} parameters exceed the limit of {MAX_PARAMETERS}")
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
    if len(data) > _MAX_REST_BYTES:
        raise InvalidArgument(
            f"the request has {len(data)} bytes besides its id and tensors; the limit is {_MAX_REST_BYTES}",
            "send large data as inputs",
        )
    try:
        return messages.ModelInferRequest.FromString(bytes(data))
    except DecodeError as error:
        raise InvalidArgument(f"the message is not a ModelInferRequest: {error}") from None


def _rewrite(data: Buffer) -> bytes:
    """Rewrite ``data``, a message in an unusual form, to the equivalent plain message."""
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


def _layout(message: Message) -> _GrpcLayout:
    """The layout of a message without its id and its tensors."""
    version = check_version(message.model_name, message.model_version)
    layout = _GrpcLayout(
        parameters=parameter_values(message.parameters), model_name=message.model_name, model_version=version
    )
    check_bytes_elements(sum(element_count(one.shape) for one in message.inputs if one.datatype == "BYTES"))
    check_names(tensor.name for tensor in message.inputs)
    for tensor in message.inputs:
        _note_input(layout, tensor)
    layout.note_outputs(output.name for output in message.outputs)
    classification: dict[str, int] = {}
    for output in message.outputs:
        if output.parameters:
            _note_output(layout, output, classification)
    if classification:
        layout.form = AnswerForm(classification=classification)
    return layout


def _note_input(layout: _GrpcLayout, tensor: Message) -> None:
    datatype, count = find_datatype(tensor.name, tensor.datatype), element_count(tensor.shape)
    size = count * datatype.itemsize if datatype.itemsize else VARIABLE
    noted = TensorLayout(tensor.name, datatype, tuple(tensor.shape), size)
    part = read_slice(f"input '{tensor.name}'", parameter_values(tensor.parameters)) if tensor.parameters else None
    if tensor.HasField("contents"):
        if part is not None:
            raise InvalidArgument(
                f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' "
                f"for model '{layout.model_name}'"
            )
        layout.typed.append(noted)
        layout.is_walked = True
    elif part is not None:
        layout.shared.append((noted, part))
    else:
        layout.raw.append(noted)
        layout.is_walked = layout.is_walked or datatype in _WALKED


def _note_output(layout: _GrpcLayout, output: Message, classification: dict[str, int]) -> None:
    what, parameters = f"output '{output.name}'", parameter_values(output.parameters)
    if "classification" in parameters:
        count = whole_number(what, parameters, "classification")
        if not count:
            raise InvalidArgument(f"{what}: 'classification' must be at least 1, got {count}")
        classification[output.name] = count
    part = read_slice(what, parameters)
    if part is not None:
        layout.note_place(output.name, part, output.name in classification)


def _is_view(tensor: TensorLayout, size: int) -> bool:
    """True if ``size`` raw bytes are the tensor's memory."""
    return 0 < tensor.size_bytes == size and tensor.datatype is not DataType.BOOL


def _array(model_name: str, tensor: TensorLayout, data: Buffer, start: int, end: int) -> Array:
    """The raw tensor in ``data[start:end]``."""
    size_bytes = tensor.size_bytes
    if _is_view(tensor, end - start):
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
