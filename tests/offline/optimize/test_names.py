from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from networks import Network
from penstock.offline.optimize.names import FreshNames, reads, subgraphs, varying_outputs


def network() -> onnx.ModelProto:
    """An If whose branch reads ``outer`` and writes ``inner``, and two constant outputs."""
    n = Network()
    n.op("Relu", "x", name="outer")
    value = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    branch = helper.make_graph([helper.make_node("Neg", ["outer"], ["inner"])], "branch", [], [value])
    n.op("If", n.weight(np.array(True)), name="y", then_branch=branch, else_branch=branch)
    constant = n.normal(3)
    twice = n.op("Add", constant, constant, name="twice")
    artifact = n.artifact({"x": ["N", 3]}, {"y": ["N", 3], twice: [3], constant: [3]})
    return onnx.load_model_from_string(artifact.data)


@pytest.mark.parametrize("taken", ["x", "outer", "y", "w0", "w1", "inner"])
def test_names_of_the_graph_and_its_subgraphs_are_taken(taken: str) -> None:
    for graph in (network().graph, ir.from_proto(network()).graph):
        fresh = FreshNames(graph)
        assert [fresh(taken), fresh(taken), fresh("free"), fresh("free")] == [
            f"{taken}_2",
            f"{taken}_3",
            "free",
            "free_2",
        ]


@given(st.lists(st.sampled_from(["x", "x_2", "x_2_2", "y", "free", "free_2"])))
def test_no_name_is_given_twice(wanted: list[str]) -> None:
    fresh = FreshNames(network().graph)
    given_names = [fresh(name) for name in wanted]
    assert len({*given_names, "x", "y", "outer", "inner"}) == len(given_names) + 4


def test_a_node_reads_what_its_branches_read() -> None:
    chosen = next(node for node in network().graph.node if node.op_type == "If")
    assert len(subgraphs(chosen)) == 2
    assert {"w0", "outer"} <= reads(chosen)


def test_outputs_that_no_input_reaches_do_not_vary() -> None:
    assert varying_outputs(network().graph) == ["y"]
