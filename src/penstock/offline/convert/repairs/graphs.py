"""The graphs and nodes of a model, for repairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
from onnx import helper

from penstock.engines.custom_ops import custom_ops


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """``graph``, and the graphs in its nodes."""
    yield graph
    for node in graph.node:
        for inner in bodies_of(node):
            yield from graphs_of(inner)


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in the attributes of ``node``."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def called_python_ops(proto: onnx.ModelProto) -> tuple[str, ...]:
    """The names of the registered operators in Python that ``proto`` calls."""
    called = {f"{node.domain}::{node.op_type}" for node in nodes_of(proto)}
    return tuple(one.name for one in custom_ops() if one.form == "python" and one.name in called)


def nodes_of(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of all graphs and functions."""
    for graph in (proto.graph, *proto.functions):
        yield from nodes_below(graph)


def nodes_below(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """The nodes of ``graph`` and of the graphs in them."""
    for node in graph.node:
        yield node
        for body in bodies_of(node):
            yield from nodes_below(body)


def set_nodes(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Replace the nodes of ``graph``. Some of ``nodes`` may be among them."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def replace_nodes(
    proto: onnx.ModelProto, operator: str, inputs: int, replacement: Callable[[onnx.NodeProto], list[onnx.NodeProto]]
) -> list[str]:
    """Replace all nodes of a standard ``operator`` with this number of inputs, in all graphs. Returns their first outputs."""
    replaced = []
    for graph in graphs_of(proto.graph):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            if node.op_type == operator and node.domain in ("", "ai.onnx") and len(node.input) == inputs:
                replaced.append(node.output[0])
                nodes += replacement(node)
            else:
                nodes.append(node)
        if len(nodes) > len(graph.node):
            set_nodes(graph, nodes)
    return replaced


def attribute_of(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """The value of an attribute of ``node``."""
    return next((helper.get_attribute_value(one) for one in node.attribute if one.name == name), default)


def opset_of(proto: onnx.ModelProto) -> int:
    """The version of the standard operators; 0 if the model uses none."""
    return max((one.version for one in proto.opset_import if one.domain in ("", "ai.onnx")), default=0)


def some(names: list[str]) -> str:
    """At most three of ``names``, for a message."""
    return ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
