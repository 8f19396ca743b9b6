"""A graph read for training: nodes in order, constants, when each value is last used, and which constants are weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, inliner, numpy_helper

from penstock.errors import InvalidArgument, InvalidModel, Unsupported
from penstock.offline.compress.training.operators import OPERATORS, Node
from penstock.offline.compress.training.operators.elementwise import DTYPES, type_name
from penstock.tensor import Array

_OLDEST_OPSET = 9
_MASK = 1e4
"""Attention masks hold -1e4, the lowest float or minus infinity; no weight is as large as that."""
_TRAINED = (np.float32, np.float64)
_DOMAINS = {"ai.onnx": ""}
_STILL_WORKS = (
    "post-training quantisation, other precisions, pruning, low rank and weight sharing work without training; "
    "or export the model without these operators"
)


class Input(msgspec.Struct, frozen=True):
    """An input of the graph; a free dimension is None."""

    name: str
    shape: tuple[int | None, ...] | None


class Program(msgspec.Struct, frozen=True):
    """The program of a graph. ``runs[i]`` is the function of ``nodes[i]``, after which the values ``last_uses[i]`` are freed."""

    inputs: tuple[Input, ...]
    outputs: dict[str, int]
    """ONNX type by name."""
    nodes: tuple[Node, ...]
    runs: tuple[Any, ...]
    last_uses: tuple[tuple[str, ...], ...]
    constants: dict[str, Array]
    weights: frozenset[str]
    """Names of the constants that are trained."""


def read_program(proto: onnx.ModelProto, frozen: Collection[str], trained: Collection[str]) -> Program:
    """Read a checked model. Local functions are inlined.

    Raises Unsupported, which names all operators that cannot be computed, for sequences, old opsets and odd types;
    InvalidArgument if ``frozen`` names no constant, or ``trained`` none of FP32.
    """
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    opset = _opset(proto)
    _refuse_operators(proto.graph)
    constants = {name: _array(tensor) for name, tensor in constant_tensors(proto.graph).items()}
    protos = [node for node in proto.graph.node if node.op_type != "Constant"]
    constants |= _plain_constants(proto.graph)
    nodes = tuple(_node(node, opset) for node in protos)
    operators = [OPERATORS[_key(node)] for node in protos]
    _check_names(constants, frozen, trained)
    chosen = _weights(constants, list(zip(nodes, operators, strict=True)))
    outputs = {value.name: value.type.tensor_type.elem_type for value in proto.graph.output}
    return Program(
        inputs=tuple(_input(value) for value in proto.graph.input if value.name not in constants),
        outputs=outputs,
        nodes=nodes,
        runs=tuple(operator.run for operator in operators),
        last_uses=_last_uses(nodes, outputs),
        constants=constants,
        weights=frozenset((chosen | set(trained)) - set(frozen)),
    )


def constant_tensors(graph: onnx.GraphProto) -> dict[str, TensorProto]:
    """The tensors of a graph by the name under which nodes read them: initialisers, and values of Constant nodes."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            found |= {
                name: attribute.t for name in node.output for attribute in node.attribute if attribute.name == "value"
            }
    return found


def _weights(constants: dict[str, Array], nodes: list[tuple[Node, Any]]) -> set[str]:
    """FP32 (or FP64) constants that training may change.

    A weight operand of an operator that has such is one whatever its size; any other differentiable operand is one if it
    has more than one element and does not look like a mask. What some operator needs fixed is none.
    """
    found: set[str] = set()
    barred: set[str] = set()
    for node, operator in nodes:
        for position, name in enumerate(node.inputs):
            array = constants.get(name)
            if array is None or array.dtype not in _TRAINED or operator.fixed is None:
                continue
            if position in operator.fixed:
                barred.add(name)
            elif position in operator.weights or (array.size > 1 and not _is_mask(array)):
                found.add(name)
    return found - barred


def _is_mask(array: Array) -> bool:
    return bool((~(np.abs(array) < _MASK)).any())


def _opset(proto: onnx.ModelProto) -> int:
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if 0 < opset < _OLDEST_OPSET:
        raise Unsupported(
            f"the model is of opset {opset}, and training needs {_OLDEST_OPSET} or newer",
            "convert it with onnx.version_converter",
        )
    return int(opset)


def _key(node: onnx.NodeProto) -> tuple[str, str]:
    return _DOMAINS.get(node.domain, node.domain), node.op_type


def _refuse_operators(graph: onnx.GraphProto) -> None:
    kinds = {value.type.WhichOneof("value") for value in (*graph.input, *graph.output)} - {"tensor_type", None}
    missing = Counter(_key(node) for node in graph.node if node.op_type != "Constant" and _key(node) not in OPERATORS)
    if missing:
        named = ", ".join(
            f"{domain + '.' if domain else ''}{op_type} ({count})"
            for (domain, op_type), count in sorted(missing.items())
        )
        raise Unsupported(f"the model has operators that cannot be trained: {named}", _STILL_WORKS)
    if kinds:
        raise Unsupported("the model has inputs or outputs that are no tensors", _STILL_WORKS)


def _array(tensor: TensorProto) -> Array:
    if tensor.data_type not in DTYPES:
        kind = type_name(tensor.data_type)
        raise Unsupported(f"'{tensor.name}' is of type {kind}, which cannot be trained with", _STILL_WORKS)
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:  # a payload that does not fit the shape: numpy and protobuf raise what they like
        raise InvalidModel(
            f"the payload of '{tensor.name}' does not fit its shape", "export the model again"
        ) from error


def _plain_constants(graph: onnx.GraphProto) -> dict[str, Array]:
    """Constant nodes that hold numbers instead of a tensor."""
    dtypes = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    found = {}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name in dtypes:
                found[node.output[0]] = np.asarray(onnx.helper.get_attribute_value(attribute), dtypes[attribute.name])
            elif attribute.name != "value":
                raise Unsupported(f"constant '{node.output[0]}' is text or sparse", _STILL_WORKS)
    return found


def _node(node: onnx.NodeProto, opset: int) -> Node:
    outputs = list(node.output)
    while len(outputs) > 1 and not outputs[-1]:
        outputs.pop()
    return Node(
        op_type=node.op_type,
        inputs=tuple(node.input),
        outputs=tuple(outputs),
        attributes={attribute.name: _attribute(attribute) for attribute in node.attribute},
        opset=opset,
    )


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return _array(value) if isinstance(value, TensorProto) else value


def _input(value: onnx.ValueInfoProto) -> Input:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return Input(value.name, None)
    dims = tensor.shape.dim
    return Input(value.name, tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims))


def _last_uses(nodes: tuple[Node, ...], outputs: Collection[str]) -> tuple[tuple[str, ...], ...]:
    seen = set(outputs)
    freed: list[tuple[str, ...]] = []
    for node in reversed(nodes):
        # A value that no node reads is freed at once.
        fresh = [name for name in dict.fromkeys((*node.inputs, *node.outputs)) if name and name not in seen]
        seen.update(fresh)
        freed.append(tuple(fresh))
    return tuple(reversed(freed))


def _check_names(constants: dict[str, Array], frozen: Collection[str], trained: Collection[str]) -> None:
    if unknown := sorted({*frozen, *trained} - constants.keys()):
        raise InvalidArgument(f"no constants of the model are called {unknown}", "give names of initialisers")
    if wrong := sorted(name for name in trained if constants[name].dtype not in _TRAINED):
        raise InvalidArgument(f"{wrong} are not FP32 and cannot be trained", "train the scales of integers instead")
