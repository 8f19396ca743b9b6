"""Faults of compressed models, as a defect of a method could cause them: a lost bias, a wrong axis, a weight of another layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from penstock.artifact import Artifact, sha256
from penstock.offline.optimize.linear import WEIGHT_INPUTS
from penstock.tensor import Array

Edit = Callable[[onnx.ModelProto], object]
_PRODUCTS = WEIGHT_INPUTS | {"MatMulInteger": (1,), "MatMulNBits": (1,)}


def edited(artifact: Artifact, edit: Edit) -> Artifact:
    """``artifact`` after ``edit``, with the same provenance and source."""
    proto = onnx.load_model_from_string(artifact.data)
    edit(proto)
    data = proto.SerializeToString()
    return msgspec.structs.replace(artifact, data=data, digest=sha256(data))


def faults(artifact: Artifact) -> Iterator[tuple[str, Artifact]]:
    """Versions of a compressed model with one fault each, and the name of the fault."""
    proto = onnx.load_model_from_string(artifact.data)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    made_by = {name: node for node in proto.graph.node for name in node.output}
    weights: dict[str, str] = {}
    for node in proto.graph.node:
        for place in _PRODUCTS.get(node.op_type, ()):
            if place < len(node.input) and (name := _stored(node.input[place], tensors, made_by)):
                weights.setdefault(name, node.op_type)
        for what, edit in _bias_faults(node, tensors, made_by):
            yield what, edited(artifact, edit)
    for name, op_type in weights.items():
        array = tensors[name]
        for what, other in _weight_faults(array, op_type):
            yield f"{what} of {name}", edited(artifact, partial(_set, name=name, array=other))
        for other_name in weights:
            other = tensors[other_name]
            if (other.shape, other.dtype) == (array.shape, array.dtype) and other_name != name:
                yield f"{other_name} in place of {name}", edited(artifact, partial(_set, name=name, array=other))
                break
    for number, node in enumerate(proto.graph.node):
        for what, edit in _scale_faults(node, number, tensors):
            yield what, edited(artifact, edit)


def _stored(name: str, tensors: dict[str, Array], made_by: dict[str, onnx.NodeProto]) -> str:
    """The initialiser that holds the numbers of a weight."""
    maker = made_by.get(name)
    if maker is not None and maker.op_type in ("DequantizeLinear", "Cast"):
        name = maker.input[0]
    return name if name in tensors and tensors[name].ndim >= 2 else ""


def _bias_faults(
    node: onnx.NodeProto, tensors: dict[str, Array], made_by: dict[str, onnx.NodeProto]
) -> Iterator[tuple[str, Edit]]:
    places = {"Conv": (2,), "Gemm": (2,), "Add": (0, 1)}.get(node.op_type, ())
    for place in places:
        if place >= len(node.input):
            continue
        maker = made_by.get(node.input[place])
        name = (
            maker.input[0] if maker is not None and maker.op_type in ("DequantizeLinear", "Cast") else node.input[place]
        )
        if name in tensors and tensors[name].any():
            yield f"lost bias {name}", partial(_set, name=name, array=np.zeros_like(tensors[name]))
            yield f"doubled bias {name}", partial(_set, name=name, array=2 * tensors[name])


def _weight_faults(array: Array, op_type: str) -> Iterator[tuple[str, Array]]:
    if array.ndim >= 2 and array.shape[-1] == array.shape[-2] > 1:
        yield "transposed", np.swapaxes(array, -1, -2)
    axis = 0 if op_type in ("Conv", "MatMulNBits") else array.ndim - 1
    if array.shape[axis] > 1:
        swapped = np.array(array)
        first, second = np.moveaxis(swapped, axis, 0)[:2].copy()
        np.moveaxis(swapped, axis, 0)[0], np.moveaxis(swapped, axis, 0)[1] = second, first
        yield "swapped channels", swapped
        yield "rolled channels", np.roll(array, 1, axis)
    flipped = np.array(array)
    channel = np.moveaxis(flipped, axis, 0)
    if op_type != "MatMulNBits":
        channel[0] = -channel[0].clip(-127, None) if array.dtype == np.int8 else -channel[0]
        yield "other sign of a channel", flipped
    if array.dtype.kind not in "iu":
        larger = np.array(array)
        np.moveaxis(larger, axis, 0)[0] *= larger.dtype.type(1.5)
        yield "1.5 times a channel", larger


def _scale_faults(node: onnx.NodeProto, number: int, tensors: dict[str, Array]) -> Iterator[tuple[str, Edit]]:
    if node.op_type == "MatMulNBits":
        name = node.input[2]
        yield f"1.5 times a block of {name}", partial(_set, name=name, array=_larger(tensors[name]))
    if node.op_type == "Mul":
        for name in node.input:
            if name.endswith("_scale") and name in tensors and tensors[name].ndim == 1:
                yield f"1.5 times a channel of {name}", partial(_set, name=name, array=_larger(tensors[name]))
                yield f"rolled scales {name}", partial(_set, name=name, array=np.roll(tensors[name], 1))
    if node.op_type != "DequantizeLinear" or not {*node.input[1:]} <= tensors.keys():
        return
    scale = tensors[node.input[1]]
    if node.input[0] in tensors:
        if scale.size > 1 and tensors[node.input[0]].ndim > 1:
            yield f"1.5 times a channel of {node.input[1]}", partial(_set, name=node.input[1], array=_larger(scale))
            yield f"rolled scales {node.input[1]}", partial(_set, name=node.input[1], array=np.roll(scale, 1))
        shape = tensors[node.input[0]].shape
        if scale.size > 1 and len(shape) == 2 and shape[0] == shape[1]:
            yield f"other axis of {node.input[0]}", partial(_turn, number=number)
    if node.input[0] in tensors or len(node.input) < 3:
        return
    zero = tensors[node.input[2]]
    off = zero + 8 if zero < 128 and zero.dtype == np.uint8 else zero - 8
    yield f"zero point of {node.output[0]} off by 8", partial(_replace, number=number, place=2, array=off)
    larger = scale * np.float32(1.5)
    yield f"1.5 times the scale of {node.output[0]}", partial(_replace, number=number, place=1, array=larger)


def _larger(scales: Array) -> Array:
    found = np.array(scales)
    found.reshape(-1)[np.abs(found).argmax()] *= 1.5
    return found


def _set(proto: onnx.ModelProto, name: str, array: Array) -> None:
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), name))


def _replace(proto: onnx.ModelProto, number: int, place: int, array: Array) -> None:
    node = proto.graph.node[number]
    old = next(tensor for tensor in proto.graph.initializer if tensor.name == node.input[place])
    array = np.asarray(array, numpy_helper.to_array(old).dtype).reshape(tuple(old.dims))
    proto.graph.initializer.append(numpy_helper.from_array(array, "faulty"))
    node.input[place] = "faulty"


def _turn(proto: onnx.ModelProto, number: int) -> None:
    axis = next(one for one in proto.graph.node[number].attribute if one.name == "axis")
    axis.i = 1 - axis.i
