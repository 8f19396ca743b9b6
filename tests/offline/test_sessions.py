from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import networks
from penstock.artifact import Artifact
from penstock.errors import InvalidModel, Unavailable
from penstock.offline.model_store import SESSION, keep_models
from penstock.offline.sessions import Overridden, call_rows, loaded, session, signature_of

X = np.ones((2, 3), np.float32)


def shifted() -> Artifact:
    """y = x + b and z = -x; b is a constant that a caller may override."""
    nodes = [helper.make_node("Add", ["x", "b"], ["y"]), helper.make_node("Neg", ["x"], ["z"])]
    float32 = TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("x", float32, ["N", 3]), helper.make_tensor_value_info("b", float32, [3])]
    outputs = [helper.make_tensor_value_info(name, float32, ["N", 3]) for name in "yz"]
    constant = numpy_helper.from_array(np.zeros(3, np.float32), "b")
    graph = helper.make_graph(nodes, "shifted", inputs, outputs, [constant])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Artifact.from_bytes(model.SerializeToString())


def test_an_optional_input_is_given_in_every_call() -> None:
    with loaded(shifted(), as_written=True) as model:
        np.testing.assert_array_equal(model.forward({"x": X})["y"], X)
        given = Overridden(model, {"b": np.full(3, 2, np.float32)})
        np.testing.assert_array_equal(given.forward({"x": X})["y"], X + 2)
        assert given.signature == model.signature
    with pytest.raises(Unavailable):
        given.forward({"x": X})


def test_only_the_outputs_of_the_given_signature_come_back() -> None:
    signature = signature_of(networks.mlp())
    with loaded(networks.mlp()) as model:
        assert list(Overridden(model, {}, signature).forward({"x": np.ones((1, 16), np.float32)})) == ["y"]


def test_other_options_are_another_session() -> None:
    with keep_models(1 << 30) as store:
        for options in ({"threads": 1}, {"threads": 1, "spinning": False}, {"threads": 1}):
            with session(networks.mlp(), "onnxruntime", options):
                pass
    assert store.made[SESSION] == 2


def test_what_does_not_load_is_refused() -> None:
    with pytest.raises(InvalidModel):
        signature_of(Artifact.from_bytes(b"not a model"))


def test_a_call_takes_the_rows_asked_for_where_the_model_leaves_the_choice() -> None:
    assert call_rows(signature_of(networks.mlp()), 5) == 5
