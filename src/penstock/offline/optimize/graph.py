"""Queries and edits of a graph that several passes share.

The edits keep one invariant: a name denotes the same tensor before and after. Therefore graph outputs keep their names, and
``verify.py`` can compare intermediate tensors of the original and the optimised model by name.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from penstock.offline.optimize.names import FreshNames
from penstock.tensor import Array

NON_DETERMINISTIC = frozenset(
    {
        "Bernoulli",
        "Dropout",  # in training mode
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)
"""Operators whose outputs may differ for the same inputs."""

FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE})


def plain_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """The main graph's nodes of the standard domain without subgraphs, in order. The graph may be edited during the iteration."""
    for node in list(model.graph):
        if node.graph is not None and node.domain == "" and not has_subgraph(node):
            yield node


def site(node: ir.Node) -> str:
    """The name of the first output of ``node`` that has a name. This name identifies the node."""
    return next((output.name for output in node.outputs if output.name), "")


def has_subgraph(node: ir.Node) -> bool:
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in kinds for attribute in node.attributes.values())


def opset(model: ir.Model) -> int:
    """The version of the standard operators that the model imports; 0 if it imports none."""
    return model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))


def is_constant(value: ir.Value | None) -> bool:
    """True if ``value`` is an initialiser that the model's caller cannot access, i.e. neither a graph input nor a graph output."""
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    return not value.is_graph_input() and not value.is_graph_output()


def constant(value: ir.Value | None) -> Array | None:
    """The array of ``value``, which callers must not modify; None if ``value`` is not constant."""
    if value is None or not is_constant(value) or value.const_value is None:
        return None
    return value.const_value.numpy()


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Input ``index`` of ``node``; None if that optional input is absent."""
    return node.inputs[index] if index < len(node.inputs) else None


def is_used(value: ir.Value) -> bool:
    """True if ``value`` is read by a node, by a node of a subgraph, or by the model's caller."""
    return bool(value.uses()) or value.is_graph_output()


def sole_consumer(value: ir.Value) -> ir.Node | None:
    """The only consumer of ``value``. None if it is in another graph, if there are several, or if ``value`` is a graph output."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    (use,) = uses
    producer = value.producer()
    return use.node if producer is not None and use.node.graph is producer.graph else None


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of ``value`` if every dimension is known."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(dim) for dim in value.shape.numpy())


def rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else value.shape.rank()


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    return node.attributes.get_int(name, default)


def ints_attribute(node: ir.Node, name: str) -> list[int] | None:
    found = node.attributes.get_ints(name)
    return None if found is None else list(found)


def float_attribute(node: ir.Node, name: str, default: float) -> float:
    return node.attributes.get_float(name, default)


def add_constant(graph: ir.Graph, array: Array, like: str) -> ir.Value:
    """Add an initialiser to ``graph`` with the value ``array`` and an unused name derived from ``like``."""
    name = FreshNames(graph)(f"{like}_folded")
    tensor = ir.Tensor(np.ascontiguousarray(array).reshape(array.shape), name=name)
    return _register(graph, tensor, name)


def replace_by_constant(node: ir.Node, array: Array | ir.TensorProtocol) -> None:
    """Remove ``node``; its only output, which is not a graph output, becomes an initialiser of the same name."""
    graph, output = node.graph, node.outputs[0]
    assert isinstance(graph, ir.Graph)
    assert output.name is not None
    tensor = ir.Tensor(np.ascontiguousarray(array).reshape(array.shape)) if isinstance(array, np.ndarray) else array
    name, output.name = output.name, None
    tensor.name = name
    output.replace_all_uses_with(_register(graph, tensor, name))
    graph.remove(node, safe=True)


def replace_by_input(node: ir.Node, source: ir.Value) -> bool:
    """Remove ``node``, whose first output equals ``source`` and whose other outputs are unused. Returns False if that is impossible.

    If the output of ``node`` is a graph output, the producer of ``source`` takes over this name. Then ``source`` must have a producer
    in the same graph and must not be a graph output itself.
    """
    graph, output = node.graph, node.outputs[0]
    assert isinstance(graph, ir.Graph)
    if output.is_graph_output():
        producer = source.producer()
        if producer is None or producer.graph is not graph or source.is_graph_output():
            return False
        name, output.name = output.name, None
        source.name, source.type = name, output.type or source.type
        source.shape = source.shape if output.shape is None else output.shape  # a scalar's shape is falsy
        output.replace_all_uses_with(source, replace_graph_outputs=True)
    else:
        output.replace_all_uses_with(source)
    graph.remove(node, safe=True)
    return True


def replace_by_nodes(node: ir.Node, nodes: list[ir.Node]) -> None:
    """Replace ``node`` by ``nodes``. The first output of the last new node takes the place of the output of ``node``."""
    graph, output, result = node.graph, node.outputs[0], nodes[-1].outputs[0]
    assert isinstance(graph, ir.Graph)
    name, output.name = output.name, None
    result.name, result.type, result.shape = name, output.type, output.shape
    graph.insert_before(node, nodes)
    output.replace_all_uses_with(result, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def replace_pair(
    first: ir.Node, second: ir.Node, op_type: str, inputs: list[ir.Value | None], attributes: list[ir.Attr]
) -> None:
    """Replace ``first`` and ``second`` by one node of ``op_type``. ``first`` must have one used output, which only ``second`` reads.

    The new node takes the place of ``second`` and produces the same value under the same name.
    """
    assert isinstance(first.graph, ir.Graph)
    replace_by_nodes(second, [ir.Node("", op_type, inputs, attributes, num_outputs=1, name=first.name)])
    first.graph.remove(first, safe=True)


def _register(graph: ir.Graph, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
    )
    graph.register_initializer(value)
    return value
