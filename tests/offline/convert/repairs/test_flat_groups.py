from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from penstock.artifact import Artifact
from penstock.offline.convert.repairs import flat_groups, repair
from penstock.offline.sessions import loaded
from penstock.tensor import Array
from tests.compared import artifact, parsed


def model() -> onnx.ModelProto:
    return parsed(
        "g (float[N,4,H,W] x) => (float[N,4,H,W] y) <float[4] scale = {1.0, 2.0, 3.0, 4.0}, float[4] bias = {0.5, -1.0, 0.0, 2.0}> "
        "{ y = GroupNormalization<num_groups=2,epsilon=0.001>(x, scale, bias) }"
    )


def run(one: Artifact, x: Array) -> Array:
    with loaded(one) as session:
        return session.forward({"x": x})["y"]


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 4, 1, 1), (3, 4, 9, 2)])
def test_the_results_are_the_same(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    repaired, (text,) = repair(artifact(model()))
    assert "y" in text
    np.testing.assert_allclose(run(repaired, x), run(artifact(model()), x), atol=2e-5)


@pytest.mark.parametrize("value", [0.7, 7.7, 255.0])
def test_a_blank_image_gives_the_bias(value: float) -> None:
    x = np.full((1, 4, 224, 224), value, np.float32)
    found = run(repair(artifact(model()))[0], x)
    np.testing.assert_allclose(found[0, :, 0, 0], [0.5, -1.0, 0.0, 2.0], atol=1e-4)


def test_half_precision() -> None:
    half = model()
    for value in (*half.graph.input, *half.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in half.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    x = np.random.default_rng(0).normal(size=(1, 4, 5, 5)).astype(np.float16)
    assert run(repair(artifact(half))[0], x).dtype == np.float16


def test_other_models_are_unchanged() -> None:
    other = parsed("g (float[N] x) => (float[N] y) { y = Abs(x) }")
    assert flat_groups.repair(other) == ""
