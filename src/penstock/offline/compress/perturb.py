"""Perturb the rounded numbers of a quantised model by the size of a rounding error.

Rounding to a step ``s`` acts like noise of the standard deviation ``s / sqrt(12)`` (Widrow and Kollár, "Quantization Noise", 2008,
chapter 5). Therefore:

1. One in twelve weights of 16 bits or less moves by one step, up or down, which has the same variance.
2. The range of each activation becomes wider by up to a quarter, so that all its values round differently. If the range clipped
   values, the outputs also change for this reason. ``widened`` makes ranges four times as wide.

Numbers that the original model also contains are not perturbed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

from penstock.tensor import Array

_MOVED, _LEAST_MOVED = 1 / 12, 3
_WIDENED, _FAR_WIDENED = (1.1, 1.25), (3.5, 4.0)
_ROUNDED = {"DequantizeLinear": (0,), "MatMulInteger": (0, 1), "MatMulNBits": (1,), "Cast": (0,)}
"""For each operator, the inputs that are rounded weights if they are constant."""
_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_HALF_TYPES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def perturbed(
    model: onnx.ModelProto, original: onnx.ModelProto, draw: int, *, widened: bool = False
) -> onnx.ModelProto | None:
    """A copy of ``model`` with perturbed numbers, which depend on the seed ``draw``; None if ``model`` has no rounded numbers."""
    constants = (one.t for node in original.graph.node if node.op_type == "Constant" for one in node.attribute)
    known = {_content(tensor) for tensor in (*original.graph.initializer, *constants)}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    tensors = {tensor.name: tensor for tensor in made.graph.initializer if known.isdisjoint(_contents(tensor))}
    weights, packed, scales = _roles(made.graph, tensors)
    rng, factors = np.random.default_rng([20_112, draw]), _FAR_WIDENED if widened else _WIDENED
    changed = False
    for name in sorted(weights | scales):
        array = numpy_helper.to_array(tensors[name])
        factor, is_packed = rng.uniform(*factors), name in packed
        new = (array * factor).astype(array.dtype) if name in scales else _moved(array, rng, is_packed=is_packed)
        if new is not None:
            tensor = numpy_helper.from_array(new, name)
            tensor.data_type = tensors[name].data_type
            tensors[name].CopyFrom(tensor)
            changed = True
    return made if changed else None


def _roles(graph: onnx.GraphProto, tensors: Collection[str]) -> tuple[set[str], set[str], set[str]]:
    """The names of rounded weights, of those rounded weights that store two numbers per byte, and of scales of activations."""
    weights: set[str] = set()
    packed: set[str] = set()
    scales: set[str] = set()
    for node in graph.node:
        weights.update(node.input[place] for place in _ROUNDED.get(node.op_type, ()) if node.input[place] in tensors)
        if node.op_type == "MatMulNBits" and any(one.name == "bits" and one.i == 4 for one in node.attribute):
            packed.add(node.input[1])
        if node.op_type == "QuantizeLinear" and node.input[0] not in tensors and node.input[1] in tensors:
            scales.add(node.input[1])
    # Not perturbed: a scale shared with weights, and one that dequantisation does not share. A wider one would change magnitudes.
    rounded = {node.output[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}
    fixed = set[str]()
    for node in (node for node in graph.node if node.op_type == "DequantizeLinear"):
        first = rounded.get(node.input[0], node)
        if node.input[0] in weights or node.input[1:] != first.input[1:]:
            fixed.update((node.input[1], first.input[1]))
    return weights - scales, packed, scales - fixed


def _moved(array: Array, rng: np.random.Generator, *, is_packed: bool) -> Array | None:
    steps = _steps(array.shape, rng)
    if is_packed:
        first, second = (array & 15).astype(np.int16) + steps, (array >> 4).astype(np.int16) + _steps(array.shape, rng)
        return np.asarray(first.clip(0, 15) | (second.clip(0, 15) << 4)).astype(np.uint8)
    if array.dtype in _HALVES:
        # Floats of one sign that are neighbours have neighbouring bit patterns.
        bits = array.view(np.uint16)
        moved = (bits.astype(np.int32) + np.where(bits & 0x7FFF, steps, 0)).astype(np.uint16).view(array.dtype)
        return np.asarray(np.where(np.isfinite(moved.astype(np.float32)), moved, array))
    if array.dtype.kind not in "iu":
        return None
    limits = np.iinfo(array.dtype)
    return np.asarray((array.astype(np.int64) + steps).clip(limits.min, limits.max)).astype(array.dtype)


def _steps(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """For each element, its step: -1, 0 or 1. At least three elements of a tensor move."""
    count = math.prod(shape)
    moved = rng.permutation(count) < max(_LEAST_MOVED, count * _MOVED)
    return np.asarray(np.where(moved, rng.choice([-1, 1], count), 0).reshape(shape))


def _contents(tensor: onnx.TensorProto) -> Iterator[tuple[int, tuple[int, ...], bytes]]:
    """The content of ``tensor``. A 16-bit tensor also yields its content in FP32 and FP64, which the original has if rounding to 16
    bits was exact."""
    yield _content(tensor)
    if tensor.data_type in _HALF_TYPES:
        array = numpy_helper.to_array(tensor)
        yield from (_content(numpy_helper.from_array(array.astype(wide))) for wide in (np.float32, np.float64))


def _content(tensor: onnx.TensorProto) -> tuple[int, tuple[int, ...], bytes]:
    return tensor.data_type, tuple(tensor.dims), numpy_helper.to_array(tensor).tobytes() if tensor.data_type else b""
