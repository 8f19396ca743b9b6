from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from benchmarks.zoo.onnx import model
from faulty_models import X, check_repaired, relu_tanh, runs
from penstock.artifact import Artifact
from penstock.errors import InvalidModel
from penstock.offline.convert.repairs import repair
from penstock.offline.optimize.model import read_proto


def test_nodes_in_reverse_order() -> None:
    def change(proto: onnx.ModelProto) -> None:
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(proto.graph.node)]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)

    assert check_repaired(relu_tanh(change)).endswith("were not in the order of execution")


def test_a_cycle_is_left_to_the_checker() -> None:
    proto = model([helper.make_node("Add", ["x", "b"], ["y"]), helper.make_node("Relu", ["y"], ["b"])], 17)
    repaired, _ = repair(Artifact.from_bytes(proto.SerializeToString()))
    with pytest.raises(InvalidModel):
        read_proto(repaired)


def test_a_long_chain_in_reverse_order_is_sorted() -> None:
    count = 3000
    nodes = [
        helper.make_node("Neg", [f"t{n}" if n else "x"], [f"t{n + 1}" if n + 1 < count else "y"]) for n in range(count)
    ]
    repaired, _ = repair(Artifact.from_bytes(model(nodes[::-1], 17).SerializeToString()))
    np.testing.assert_array_equal(runs(repaired), X)
