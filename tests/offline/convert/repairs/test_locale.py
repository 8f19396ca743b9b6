from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from benchmarks.zoo.onnx import value
from penstock.artifact import Artifact
from penstock.offline.convert.repairs import repair
from penstock.offline.sessions import loaded


def test_text_features_load_without_the_american_locale() -> None:
    """ONNX Runtime refuses en_US.UTF-8 where that locale is not installed, which is so on most servers."""
    node = helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER", locale="en_US.UTF-8")
    graph = helper.make_graph(
        [node], "text", [value("x", ["N"], TensorProto.STRING)], [value("y", ["N"], TensorProto.STRING)]
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    repaired, done = repair(Artifact.from_bytes(proto.SerializeToString()))
    assert "C.UTF-8" in done[0]
    texts = np.array([b"HELLO", "ÜBER Straße".encode()], np.object_)
    with loaded(repaired) as loaded_model:
        assert [one.decode() for one in loaded_model.forward({"x": texts})["y"]] == ["hello", "über straße"]
