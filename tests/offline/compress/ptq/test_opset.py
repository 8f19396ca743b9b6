"""Models of old opsets give the same answers after their conversion, or are refused."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

import networks
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.offline.compress.ptq.opset import at_opset
from penstock.offline.compress.ptq.qdq_placement import FloatModel
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import read_proto


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_converted_model_takes_no_rows_as_the_original_does(operator: str, axis: int) -> None:
    n = networks.Network()
    n.op(operator, n.conv("x", 3, 4), axis=axis, name="y")
    artifact = n.artifact({"x": ["N", 3, 6, 6]}, {"y": ["N", 4, 6, 6]}, opset=11)
    for rows in (0, 1, 3):
        x = np.random.default_rng(0).standard_normal((rows, 3, 6, 6)).astype(np.float32)
        models = artifact, FloatModel(artifact).artifact()
        before, after = (OnnxRuntimeEngine().load(model, {}).forward({"x": x})["y"] for model in models)
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("factors", [(1.5, 2.3), (2, 2), (0.5, 0.7), (1, 0.4), (3, 1)], ids=str)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("opset", "operator"), [(9, "Upsample"), (10, "Resize")])
def test_old_resizes_keep_their_coordinates(
    opset: int, operator: str, constant: bool, factors: tuple[float, float], mode: str
) -> None:
    if operator == "Upsample" and min(factors) < 1:
        pytest.skip("Upsample only enlarges")
    n = networks.Network()
    scales = np.array([1, 1, *factors], np.float32)
    name = n.op("Constant", value=numpy_helper.from_array(scales)) if constant else n.weight(scales)
    n.op(operator, n.conv("x", 3, 4), name, mode=mode, name="y")
    artifact = n.artifact({"x": ["N", 3, 6, 6]}, {"y": ["N", 4, "H", "W"]}, opset=opset)
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)
    before, after = (
        OnnxRuntimeEngine().load(model, {}).forward({"x": x})["y"]
        for model in (artifact, FloatModel(artifact).artifact())
    )
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("opset", "operator"), [(10, "Resize"), (12, "Hardmax")])
def test_what_the_converter_would_change_stays_the_same(opset: int, operator: str) -> None:
    n = networks.Network()
    scales = [n.weight(np.array([1, 1, 2, 0.5], np.float32))] if operator == "Resize" else []
    n.op(operator, n.conv("x", 3, 4), *scales, name="y")
    artifact = n.artifact({"x": ["N", 3, 6, 6]}, {"y": ["N", 4, "H", "W"]}, opset=opset)
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)
    before, after = (
        OnnxRuntimeEngine().load(model, {}).forward({"x": x})["y"]
        for model in (artifact, artifact_of(at_opset(read_proto(artifact))))
    )
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
