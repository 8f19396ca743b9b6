"""Read a graph for training: nodes in order, constants, the constants to train, and the last use of each value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, inliner

from penstock.errors import InvalidArgument, InvalidModel, Unsupported
from penstock.offline.compress.training.operators import OPERATORS, Node
from penstock.offline.compress.training.operators.elementwise import DTYPES, type_name
from penstock.offline.compress.training.operators.registry import Operator
from penstock.offline.optimize.mapped import array_of
from penstock.tensor import Array

_OLDEST_OPSET = 9
_MASK = 1e4
"""A constant with an element of this magnitude is a mask, not a weight. Attention masks contain -1e4, the lowest float or -inf."""
_TRAINED = (np.float32, np.float64)
_DOMAINS = {"ai.onnx": ""}
_STILL_WORKS = (
    "use a method that works without training (post-training quantisation, other precisions, pruning, low rank, "
    "weight sharing), or export the model without these operators"
)


Shape = tuple[int | None, ...] | None
"""The shape of an input. A free dimension is None; if the rank is unknown, the whole shape is None."""


class ProgramStep(NamedTuple):
    """One node to compute."""

    node: Node
    run: Callable[..., Any]
    """The function that computes the node."""
    freed: tuple[str, ...]
    """Values that can be freed, since no later node reads them."""


class Program(msgspec.Struct, frozen=True):
    """The nodes and constants of a graph, ready to run."""

    inputs: dict[str, Shape]
    outputs: dict[str, int]
    """The ONNX type of each value, by name."""
    steps: tuple[ProgramStep, ...]
    constants: dict[str, Array]
    weights: frozenset[str]
    """Names of the constants that are trained."""


def read_program(proto: onnx.ModelProto, frozen: Collection[str], trained: Collection[str]) -> Program:
    """Read a checked model. Local functions are inlined.

    Raises Unsupported, with the names of all operators that cannot be computed, and for sequences, old opsets and unsupported types.
    Raises InvalidArgument if a name in ``frozen`` or ``trained`` is not a constant, or a name in ``trained`` is not FP32.
    """
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    opset = _opset(proto)
    _refuse_operators(proto.graph)
    constants = {name: _array(tensor) for name, tensor in constant_tensors(proto.graph).items()}
    constants |= _plain_constants(proto.graph)
    protos = [node for node in proto.graph.node if node.op_type != "Constant"]
    nodes = [_node(node, opset) for node in protos]
    operators = [OPERATORS[_key(node)] for node in protos]
    _check_names(constants, frozen, trained)
    chosen = _weights(constants, zip(nodes, operators, strict=True))
    outputs = {value.name: value.type.tensor_type.elem_type for value in proto.graph.output}
    runs = [operator.run for operator in operators]
    return Program(
        inputs={value.name: _shape(value) for value in proto.graph.input if value.name not in constants},
        outputs=outputs,
        steps=tuple(map(ProgramStep, nodes, runs, _last_uses(nodes, outputs))),
        constants=constants,
        weights=frozenset((chosen - outputs.keys() | set(trained)) - set(frozen)),
    )


def constant_tensors(graph: onnx.GraphProto) -> dict[str, TensorProto]:
    """The tensors that nodes of a graph read, by name: initialisers, and values of Constant nodes."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                found[node.output[0]] = attribute.t
    return found


def _weights(constants: dict[str, Array], nodes: Iterable[tuple[Node, Operator]]) -> set[str]:
    """FP32 (or FP64) constants that training may change.

    The constants are the weight operands of operators, and other differentiable operands that have more than one element and do not
    look like a mask. Constants that an operator requires to be fixed are excluded.
    """
    found, barred = set[str](), set[str]()
    for node, operator in nodes:
        for position, name in enumerate(node.inputs):
            array = constants.get(name)
            if array is None or array.dtype not in _TRAINED or operator.fixed is None:
                continue
            if position in operator.fixed:
                barred.add(name)
            elif position in operator.weights or (array.size > 1 and (np.abs(array) < _MASK).all()):
                found.add(name)
    return found - barred


def _opset(proto: onnx.ModelProto) -> int:
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if 0 < opset < _OLDEST_OPSET:
        raise Unsupported(
            f"the model has opset {opset}, but training needs {_OLDEST_OPSET} or newer",
            "convert the model with onnx.version_converter",
        )
    return int(opset)


def _key(node: onnx.NodeProto) -> tuple[str, str]:
    return _DOMAINS.get(node.domain, node.domain), node.op_type


def _refuse_operators(graph: onnx.GraphProto) -> None:
    missing = Counter(_key(node) for node in graph.node if node.op_type != "Constant" and _key(node) not in OPERATORS)
    if missing:
        named = [f"{'.'.join(filter(None, key))} ({count})" for key, count in sorted(missing.items())]
        raise Unsupported(f"the model has operators that cannot be trained: {', '.join(named)}", _STILL_WORKS)
    if {value.type.WhichOneof("value") for value in (*graph.input, *graph.output)} - {"tensor_type", None}:
        raise Unsupported("the model has inputs or outputs that are not tensors", _STILL_WORKS)


def _array(tensor: TensorProto) -> Array:
    if tensor.data_type not in DTYPES:
        kind = type_name(tensor.data_type)
        raise Unsupported(f"'{tensor.name}' is of type {kind}, which training does not support", _STILL_WORKS)
    try:
        return array_of(tensor)
    except Exception as error:  # numpy and protobuf raise various exceptions for a payload that does not fit the shape
        raise InvalidModel(
            f"the payload of '{tensor.name}' does not fit its shape", "export the model again"
        ) from error


def _plain_constants(graph: onnx.GraphProto) -> dict[str, Array]:
    """The values of Constant nodes with numbers instead of a tensor."""
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


def _shape(value: onnx.ValueInfoProto) -> Shape:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)


def _last_uses(nodes: list[Node], outputs: Collection[str]) -> list[tuple[str, ...]]:
    """For each node, the values to free after it."""
    seen = set(outputs)
    freed: list[tuple[str, ...]] = []
    for node in reversed(nodes):
        # An output that no node reads is freed immediately.
        fresh = [name for name in dict.fromkeys((*node.inputs, *node.outputs)) if name and name not in seen]
        seen.update(fresh)
        freed.append(tuple(fresh))
    return freed[::-1]


def _check_names(constants: dict[str, Array], frozen: Collection[str], trained: Collection[str]) -> None:
    if unknown := sorted({*frozen, *trained} - constants.keys()):
        raise InvalidArgument(f"no constants of the model are called {unknown}", "give the names of initialisers")
    if wrong := sorted(name for name in trained if constants[name].dtype not in _TRAINED):
        raise InvalidArgument(
            f"{wrong} are not FP32 and cannot be trained", "name FP32 constants, such as the scales of integers"
        )
