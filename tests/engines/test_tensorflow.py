from __future__ import annotations

import importlib.util

import numpy as np
import pytest

# Not imported to find out: that takes five seconds.
if not importlib.util.find_spec("tensorflow"):
    pytest.skip("the extra penstock[tensorflow] is not installed", allow_module_level=True)

import tensorflow_models
from conformance.engines import EngineConformance
from penstock.engines.tensorflow import TensorFlowEngine
from penstock.errors import InvalidConfig, PenstockError


class TestConformance(EngineConformance):
    engine = TensorFlowEngine()
    zoo = tensorflow_models
    excluded = {
        "test_failure_at_run_time_leaves_the_model_usable": "TensorFlow writes what fails to stderr, too",
        "test_several_inputs_and_outputs_in_signature_order": "a SavedModel's signature has no order: names are sorted",
        "test_input_that_no_node_reads": "a SavedModel's signature has no order: names are sorted",
    }


def test_signature_that_the_model_lacks() -> None:
    model = TensorFlowEngine().load(tensorflow_models.linear(), {"signature": "serving_default"})
    assert model.forward({"x": np.ones((1, 3), np.float32)})["y"].shape == (1, 2)
    with pytest.raises(InvalidConfig, match="no signature 'other' .it has: serving_default"):
        TensorFlowEngine().load(tensorflow_models.linear(), {"signature": "other"})


def test_failure_at_run_time_is_told_in_a_line() -> None:
    model = TensorFlowEngine().load(tensorflow_models.fails_on_odd_batch(), {})
    with pytest.raises(PenstockError, match="^the model failed: Input to reshape is a tensor with 6 values"):
        model.forward({"x": np.ones((3, 2), np.float32)})
    assert model.forward({"x": np.ones((4, 2), np.float32)})["y"].shape == (2, 4)


def test_names_are_in_alphabetical_order() -> None:
    model = TensorFlowEngine().load(tensorflow_models.sum_and_difference(), {})
    a, b = np.full((2, 1, 2), [[[5.0]], [[3.0]]], np.float32)
    answer = model.forward({"b": b, "a": a})
    assert {name: array.tolist() for name, array in answer.items()} == {"difference": [[2, 2]], "sum": [[8, 8]]}
    assert list(answer) == model.signature.output_names == ["difference", "sum"]
    unread = TensorFlowEngine().load(tensorflow_models.unread_input(), {})
    assert unread.signature.input_names == ["unread", "x"]
