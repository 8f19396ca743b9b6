from __future__ import annotations

from benchmarks.zoo.onnx import branches_9, function_17, machine_learning
from penstock.offline.convert.repairs.graphs import attribute_of, graphs_of, nodes_of, opset_of, some


def test_graphs_within_nodes_and_functions_are_found() -> None:
    assert [graph.name for graph in graphs_of(branches_9().graph)] == ["zoo", "else", "then"]
    assert [node.op_type for node in nodes_of(function_17())] == ["Swish", "Sigmoid", "Mul"]


def test_the_opset() -> None:
    proto = machine_learning()
    assert opset_of(proto) == 9
    proto.opset_import[0].domain = "ai.onnx"
    assert opset_of(proto) == 9
    del proto.opset_import[0]
    assert opset_of(proto) == 0


def test_attributes() -> None:
    node = machine_learning().graph.node[1]
    assert attribute_of(node, "targets", 1) == 2
    assert attribute_of(node, "absent", 7) == 7


def test_a_list_of_names_is_short() -> None:
    assert some(["a", "b"]) == "'a', 'b'"
    assert some(list("abcde")) == "'a', 'b', 'c' and 2 more"
