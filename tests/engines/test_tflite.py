from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="the extra penstock[tflite] is not installed")

import models
import tflite_models
from conformance.engines import EngineConformance
from penstock.engines.tflite import TfLiteEngine
from penstock.errors import InvalidConfig
from penstock.tensor import DataType


class TestConformance(EngineConformance):
    engine = TfLiteEngine()
    zoo = tflite_models
    excluded = {
        "test_integers_beyond_32_bits[UINT64]": "LiteRT does not add UINT64",
        "test_64_bit_floats_keep_their_precision": "LiteRT does not add FP64",
    }


def test_without_a_signature_tensors_go_by_their_names() -> None:
    model = TfLiteEngine().load(tflite_models.identity(DataType.INT8, signature=False), {})
    x = np.array([[1, -2]], np.int8)
    assert (model.signature.input_names, model.signature.output_names) == (["x"], ["y"])
    np.testing.assert_array_equal(model.forward({"x": x})["y"], x)


def test_signature_that_the_model_lacks() -> None:
    model = TfLiteEngine().load(tflite_models.linear(), {"signature": "serving_default"})
    assert model.signature.input_names == ["x"]
    with pytest.raises(InvalidConfig, match="no signature 'other' .its signatures: serving_default"):
        TfLiteEngine().load(tflite_models.linear(), {"signature": "other"})


def test_a_fixed_batch_can_be_freed() -> None:
    model = TfLiteEngine().load(tflite_models.fixed_batch(), {"free_batch": True})
    assert model.signature.batchable
    for rows in (1, 4, 2):
        x = np.random.default_rng(0).standard_normal((rows, 3)).astype(np.float32)
        np.testing.assert_array_equal(model.forward({"x": x})["y"], -x)


def test_quantised_tensors_stay_as_they_are_stored() -> None:
    model = TfLiteEngine().load(tflite_models.quantised(), {})
    assert [spec.datatype for spec in model.signature.inputs + model.signature.outputs] == [DataType.INT8] * 2
    y = model.forward({"x": np.array([[3, 7, -5]], np.int8)})["y"]
    np.testing.assert_array_equal(y, np.array([[0, 4, -8]], np.int8))


def test_memory_is_planned_anew_only_when_a_shape_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[int] = []
    model = TfLiteEngine().load(tflite_models.linear(), {})
    interpreter = type(model._interpreter)
    real = interpreter.allocate_tensors
    monkeypatch.setattr(interpreter, "allocate_tensors", lambda self: (plans.append(1), real(self))[1])
    weight = models.linear_weight()
    for rows, planned in ((1, 0), (4, 1), (4, 1), (1, 2), (1, 2)):
        x = np.ones((rows, 3), np.float32)
        np.testing.assert_allclose(model.forward({"x": x})["y"], x @ weight, rtol=1e-5)
        assert len(plans) == planned
