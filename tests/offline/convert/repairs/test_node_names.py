from __future__ import annotations

import onnx

from faulty_models import check_repaired, relu_tanh


def test_nodes_with_one_name() -> None:
    def change(proto: onnx.ModelProto) -> None:
        for node in proto.graph.node:
            node.name = "node"

    assert check_repaired(relu_tanh(change)) == "several nodes had the same name: 'node'"
