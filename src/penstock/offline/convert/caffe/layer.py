"""``Layer``: one layer of a Caffe network, which computes itself in numpy and writes itself as ONNX nodes.

``run`` follows the formulas of Caffe's own source, and ``write`` the definitions of ONNX. Neither calls the other, so comparing them
proves something.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from penstock.errors import InvalidModel
from penstock.offline.convert.caffe.prototxt import TextMessage
from penstock.tensor import Array

Shape: TypeAlias = tuple[int, ...]

_MAX_ELEMENTS = 2**28


class Layer:
    """A layer with its parameters and its blobs of weights."""

    parameter: ClassVar[str] = ""
    """The field with the parameters of this type of layer."""

    def __init__(self, fields: TextMessage, kind: str, blobs: Sequence[Array] = ()) -> None:
        self.fields, self.kind, self.blobs = fields, kind, list(blobs)
        self.name = fields.get("name", "") or f"{kind} in line {fields.line}"
        self.bottoms, self.tops = fields.all("bottom", str), fields.all("top", str)
        self.given = fields.message(self.parameter)
        """The parameters."""

    @property
    def where(self) -> str:
        return f"layer '{self.name}' ({self.kind}, line {self.fields.line})"

    def refusal(self) -> str:
        """The parameter that makes the layer unsupported; empty if there is none."""
        return ""

    def run(self, *bottoms: Array) -> Array | list[Array]:
        """The values of the tops. Raises ValueError and the like if the parameters, weights or shapes do not fit."""
        raise NotImplementedError

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str | list[str]:
        """Write the nodes that compute the tops, and return the names of their outputs. ``shapes`` are those of the bottoms."""
        raise NotImplementedError

    def blob(self, number: int, *shape: int) -> Array:
        """The weights ``number`` in this shape. Old files store all weights with four dimensions. Raises InvalidModel."""
        if number >= len(self.blobs):
            raise InvalidModel(f"it needs {number + 1} blob(s) of weights, but the file has {len(self.blobs)}")
        if self.blobs[number].size != math.prod(shape):
            have, want = list(self.blobs[number].shape), list(shape)
            raise InvalidModel(f"blob {number} of its weights has shape {have}, but {want} is needed")
        return self.blobs[number].reshape(shape)

    def axis(self, rank: int, default: int = 1, name: str = "axis") -> int:
        """The parameter ``name``, an axis, counted from the front."""
        axis = self.given.get(name, default)
        if not -rank <= axis < rank:
            raise InvalidModel(f"'{name}' is {axis}, but its input has {rank} dimensions")
        return axis % rank


class Writer:
    """Collects the nodes and constants of a graph. The names of both begin with the name of the layer that writes them."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.layer = ""
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}

    def node(self, op_type: str, *inputs: str | Array, count: int = 1, **attributes: Any) -> Any:
        """Add a node, and return the name of its output; a list of names if ``count`` is not 1. Arrays become constants."""
        name = f"{self.layer}/{op_type}_{len(self.nodes)}"
        outputs = [f"{name}:{number}" for number in range(count)]
        names = [one if isinstance(one, str) else self.constant(one) for one in inputs]
        self.nodes.append(helper.make_node(op_type, names, outputs, name, **attributes))
        return outputs if count != 1 else outputs[0]

    def constant(self, array: Array) -> str:
        name = f"{self.layer}/constant_{len(self.constants)}"
        self.constants[name] = array
        return name

    def copy(self, name: str) -> onnx.NodeProto:
        self.node("Identity", name)
        return self.nodes[-1]

    def tensors(self) -> Iterator[onnx.TensorProto]:
        for name, array in self.constants.items():
            yield numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def whole(*numbers: int) -> Array:
    """``numbers`` as ONNX takes shapes and axes."""
    return np.array(numbers, np.int64)


def scalar(number: float) -> Array:
    return np.array(number, np.float32)


def check_size(shape: Sequence[int]) -> None:
    """Raise InvalidModel if a blob of ``shape`` would be empty, or too large to compute."""
    if any(dim < 1 for dim in shape) or math.prod(shape) > _MAX_ELEMENTS:
        raise InvalidModel(f"a blob would have shape {list(shape)}, which is impossible or too large")
