"""Repair graphs within nodes: ONNX Runtime refuses one that returns a tensor from outside, or that writes a name from outside."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import onnx
from onnx import helper

from penstock.offline.convert.repairs.graphs import bodies_of, some


def repair(proto: onnx.ModelProto) -> str:
    done: list[str] = []
    _repair(proto.graph, frozenset(), done)
    return f"graphs within nodes returned or hid tensors from outside: {some(done)}" if done else ""


def _repair(graph: onnx.GraphProto, outside: AbstractSet[str], done: list[str]) -> None:
    made = {name for node in graph.node for name in node.output if name}
    given = {one.name for one in (*graph.input, *graph.initializer)}
    for name in sorted(outside & (made | given)):
        done.append(name)
        _rename(graph, name, f"{name}/{graph.name}_{len(done)}")
    own = {name for node in graph.node for name in node.output} | {
        one.name for one in (*graph.input, *graph.initializer)
    }
    for output in graph.output:
        if output.name in outside and output.name not in own:
            done.append(output.name)
            copy = f"{output.name}/{graph.name}_{len(done)}"
            graph.node.append(helper.make_node("Identity", [output.name], [copy]))
            output.name = copy
    for node in graph.node:
        for body in bodies_of(node):
            _repair(body, outside | own, done)


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a tensor of ``graph``, also where the graphs within it read it."""
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = new if value.name == old else value.name
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
        for body in bodies_of(node):
            own = {name for inner in body.node for name in inner.output} | {value.name for value in body.input}
            if old not in own:
                _rename(body, old, new)
