"""The inputs and outputs of a pipeline as tensors of the Open Inference Protocol, and its outputs as JSON.

Text and files are BYTES tensors of one element. A list of texts is a BYTES tensor of rank 1, and a list of arrays of equal shapes is
an array with one more dimension.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.errors import InvalidArgument, quoted
from penstock.pipeline.function import Function
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array, DataType, Signature, TensorSpec, as_bytes

_LARGE = 4_096
"""Number of elements from which ``to_json`` may keep an array."""


def signature_of(function: Function) -> Signature:
    """The tensors of ``function``, without a batch dimension."""
    inputs = (_spec(name, kind) for name, kind in function.inputs.items())
    return Signature(tuple(inputs), tuple(_spec(name, kind) for name, kind in function.outputs.items()))


def to_values(function: Function, tensors: Mapping[str, Array]) -> dict[str, Value]:
    """The inputs of ``function``, whose tensors fit its ``signature_of``. Raises InvalidArgument for text that is not UTF-8."""
    return {name: _value(name, function.inputs[name], array) for name, array in tensors.items()}


def to_tensors(function: Function, values: Mapping[str, Value]) -> dict[str, Array]:
    """The outputs of ``function`` as tensors. Raises InvalidArgument if the elements of a list have different shapes."""
    return {name: _tensor(name, function.outputs[name], value) for name, value in values.items()}


def to_json(function: Function, tensors: Mapping[str, Array]) -> dict[str, Any]:
    """The output ``tensors`` as plain data: text as strings, files in base64, and arrays as nested lists."""
    members = to_members(function, tensors)
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in members.items()}


def to_members(function: Function, tensors: Mapping[str, Array]) -> dict[str, Any]:
    """As ``to_json``, but with arrays instead of nested lists, which take many times as much memory."""
    return {name: _plain(function.outputs[name], array) for name, array in tensors.items()}


def _spec(name: str, kind: ValueType) -> TensorSpec:
    if kind.many:
        return TensorSpec(name, kind.datatype, (-1, *kind.shape))
    return TensorSpec(name, kind.datatype, kind.shape or (1,))


def _value(name: str, kind: ValueType, array: Array) -> Value:
    if kind.datatype is not DataType.BYTES or kind.media is Media.TENSOR:
        return array if kind.shape else array.reshape(())
    elements = [_text(name, as_bytes(one)) if kind.media is Media.TEXT else as_bytes(one) for one in array.reshape(-1)]
    return elements if kind.many else elements[0]


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the text of input {quoted(name)} is not UTF-8: {error.reason}", "encode it") from None


def _tensor(name: str, kind: ValueType, value: Value) -> Array:
    if kind.datatype is DataType.BYTES and kind.media is not Media.TENSOR:
        found = np.empty(len(value) if kind.many else 1, np.object_)
        found[:] = [as_bytes(one) for one in (value if kind.many else [value])]
        return found
    if not kind.many:
        array = np.asarray(value)
        return np.ascontiguousarray(array if array.ndim else array[None])
    if not value:
        return np.zeros((0, *(max(0, size) for size in kind.shape)), kind.datatype.dtype)
    shapes = {np.shape(one) for one in value}
    if len(shapes) > 1:
        raise InvalidArgument(
            f"the elements of output {quoted(name)} have different shapes, {sorted(shapes)}",
            "a list of arrays is one tensor: make its elements equal in size, or leave out this output",
        )
    return np.stack(value)


def _plain(kind: ValueType, array: Array) -> Any:
    if kind.datatype is DataType.BYTES and kind.media is not Media.TENSOR:
        elements = [_shown(kind, one) for one in array]
        return elements if kind.many else elements[0]
    if array.dtype.kind == "O":
        return np.frompyfunc(lambda one: as_bytes(one).decode(errors="replace"), 1, 1)(array).tolist()
    if array.dtype.kind not in "biu":
        array = array.astype(np.float64)  # as in a list, so that no digit depends on the datatype
    return array if kind.shape or kind.many else array[0].item()


def _shown(kind: ValueType, data: bytes) -> str:
    return data.decode(errors="replace") if kind.media is Media.TEXT else base64.b64encode(data).decode()
