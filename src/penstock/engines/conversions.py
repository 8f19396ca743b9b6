"""Convert tensors to and from the forms that ONNX Runtime's Python interface expects."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import onnxruntime as ort

from penstock.errors import InvalidArgument, Unsupported
from penstock.tensor import Array, DataType, TensorSpec, as_bytes

_PADDED_BYTES = 64 << 20
"""Maximum bytes of an input that is not UTF-8 text, after all its elements are padded to the same length."""


def from_maps(spec: TensorSpec, maps: Any) -> Array:
    """The tensor of ``maps``: one row per map, with the values in the order of the keys. Raises Unsupported if the maps have
    different keys.
    """
    keys = sorted(maps[0]) if maps else []
    if any(sorted(one) != keys for one in maps):
        raise Unsupported(f"output '{spec.name}' has maps with different keys, which cannot form one tensor")
    return np.array([[one[key] for key in keys] for one in maps], spec.datatype.dtype).reshape(len(maps), len(keys))


def to_text(name: str, array: Array) -> Array:
    """``array`` in the form that ONNX Runtime expects: text if all elements are UTF-8, otherwise numpy's bytes type.

    ONNX Runtime would convert bytes objects with ``str(element)``. It reads each element of numpy's bytes type up to a zero byte,
    even beyond the element's end. The returned type is therefore one byte wider than the longest element.
    """
    elements = [as_bytes(element) for element in array.reshape(-1).tolist()]
    try:
        return np.array([element.decode() for element in elements], dtype=np.object_).reshape(array.shape)
    except UnicodeDecodeError:
        pass
    for number, element in enumerate(elements):
        if b"\0" in element:
            raise InvalidArgument(
                f"element {number} of input '{name}' contains a zero byte, "
                "which ONNX Runtime accepts only if all elements are UTF-8 text",
                "send text, or the bytes as a UINT8 tensor",
            )
    width = max(map(len, elements)) + 1
    if width * len(elements) > max(_PADDED_BYTES, 2 * sum(map(len, elements))):
        raise InvalidArgument(
            f"input '{name}' has text that is not UTF-8, so its {len(elements)} elements are padded to {width} bytes each, "
            f"which exceeds the limit of {_PADDED_BYTES} bytes",
            "send text, elements of similar length, or the bytes as a UINT8 tensor",
        )
    return np.array(elements, np.dtype((np.bytes_, width))).reshape(array.shape)


def from_text(array: Array) -> Array:
    encoded = np.empty(array.size, np.object_)
    encoded[:] = [element.encode() for element in array.reshape(-1).tolist()]
    return encoded.reshape(array.shape)


def to_value(array: Array) -> ort.OrtValue:
    if array.dtype == DataType.BF16.dtype:
        bits = np.asarray(array, order="C").view(np.uint16)  # keeps rank 0
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, DataType.BF16.onnx)
    return ort.OrtValue.ortvalue_from_numpy(array)


def from_value(value: ort.OrtValue) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    array = np.empty(value.shape(), DataType.BF16.dtype)
    ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array
