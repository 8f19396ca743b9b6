"""The layers that can be split, and their replacement by factors: at full rank the outputs are unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from networks import Network
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.offline.compress.low_rank.convolution import WHOLE, SplitForm, spatial, spatial_split, tucker
from penstock.offline.compress.low_rank.layers import alone, layers, measure, replace
from penstock.offline.compress.low_rank.matrix import Split, decompose
from penstock.offline.optimize.model import load_model, to_artifact
from penstock.tensor import Array

# Factors of full rank differ from the whole by the rounding of two or three FP32 products in a row.
ROUNDING = 2e-5


def run(artifact: Artifact, x: Array) -> Array:
    return get_engine("onnxruntime").load(artifact, {"threads": 1}).forward({"x": x})["y"]


def whole(weight: Array, form: SplitForm) -> Split:
    outputs, inputs, *kernel = weight.shape
    if form is SplitForm.SPATIAL:
        return spatial_split(spatial(weight, None), min(outputs * kernel[1], inputs * kernel[0]), weight.shape)
    if form is SplitForm.TUCKER:
        return tucker(weight, (inputs, outputs), None, None)[0]
    matrix = weight.reshape(outputs, -1)
    return decompose(matrix, None, of_results=True, centred=False).at(min(matrix.shape), tuple(kernel))


def convolution(bias: bool = True, **attributes: Any) -> Artifact:
    n = Network(1)
    inputs = ["x", n.normal(6, 4, 3, 5), *([n.normal(6)] if bias else [])]
    n.op("Conv", *inputs, name="y", **attributes)
    return n.artifact({"x": ["N", 4, 13, 14]}, {"y": ["N", 6, "h", "w"]})


@pytest.mark.parametrize("form", list(SplitForm))
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"pads": [1, 2, 1, 2]},
        {"pads": [0, 3, 2, 1], "strides": [2, 3]},
        {"dilations": [2, 1], "pads": [2, 0, 1, 4], "strides": [1, 2]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER"},
        {"auto_pad": "VALID", "kernel_shape": [3, 5]},
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_keep_their_places(attributes: dict[str, Any], form: SplitForm, bias: bool) -> None:
    artifact = convolution(bias, **attributes)
    model = load_model(artifact)
    (layer,) = layers(model)
    replace(layer, form, whole(layer.weight, form))
    changed = to_artifact(model)
    proto = onnx.load_model_from_string(changed.data)
    onnx.checker.check_model(proto, full_check=True)
    assert len(proto.graph.node) == (3 if form is SplitForm.TUCKER else 2)
    assert len(proto.graph.initializer) == len(proto.graph.node) + bias
    x = np.random.default_rng(0).standard_normal((2, 4, 13, 14)).astype(np.float32)
    want, got = run(artifact, x), run(changed, x)
    assert want.shape == got.shape
    np.testing.assert_allclose(got, want, atol=ROUNDING * np.abs(want).max())


@pytest.mark.parametrize(
    "attributes", [{}, {"transB": 1}, {"alpha": 0.5, "beta": -2.0}, {"transB": 1, "alpha": 3.0}], ids=str
)
@pytest.mark.parametrize("bias", [(), (7,), (1, 7), (1,), None], ids=str)
def test_gemms_keep_their_attributes(attributes: dict[str, Any], bias: tuple[int, ...] | None) -> None:
    n = Network(2)
    shape = (7, 9) if attributes.get("transB") else (9, 7)
    n.op("Gemm", "x", n.normal(*shape), *([] if bias is None else [n.normal(*bias)]), name="y", **attributes)
    artifact = n.artifact({"x": ["N", 9]}, {"y": ["N", 7]})
    check_product(artifact, (5, 9))


def test_matmuls_of_any_rank_are_split_and_shared_weights_kept() -> None:
    n = Network(2)
    w = n.normal(9, 9)
    n.op("MatMul", n.op("MatMul", "x", w), w, name="y")
    artifact = n.artifact({"x": ["N", 4, 9]}, {"y": ["N", 4, 9]})
    check_product(artifact, (2, 4, 9))


def check_product(artifact: Artifact, shape: tuple[int, ...]) -> None:
    model = load_model(artifact)
    for layer in layers(model):
        replace(layer, SplitForm.CHANNEL, whole(layer.weight, SplitForm.CHANNEL))
    changed = to_artifact(model)
    onnx.checker.check_model(onnx.load_model_from_string(changed.data), full_check=True)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    want = run(artifact, x)
    np.testing.assert_allclose(run(changed, x), want, atol=ROUNDING * np.abs(want).max())


def test_three_dimensions_and_one() -> None:
    for size in ((8,), (6, 5, 4)):
        n = Network(3)
        kernel = (3, 2, 2)[: len(size)]
        n.op("Conv", "x", n.normal(6, 4, *kernel), n.normal(6), name="y", strides=[2] * len(size))
        artifact = n.artifact({"x": ["N", 4, *size]}, {"y": ["N", 6, *"abc"[: len(size)]]})
        for form in (SplitForm.CHANNEL, SplitForm.TUCKER):
            model = load_model(artifact)
            replace(layers(model)[0], form, whole(layers(model)[0].weight, form))
            x = np.random.default_rng(0).standard_normal((2, 4, *size)).astype(np.float32)
            want = run(artifact, x)
            np.testing.assert_allclose(run(to_artifact(model), x), want, atol=1e-5 * np.abs(want).max())


def test_what_is_left_alone() -> None:
    n = Network()
    x = n.op("Conv", "x", n.normal(8, 2, 3, 3), group=2)
    x = n.op("Conv", x, n.normal(16, 8, 1, 1))  # narrow
    x = n.op("Conv", x, n.normal(1, 16, 3, 3))  # one row
    x = n.op("MatMul", x, n.normal(1, 2, 2, fan_in=4))  # not one matrix
    x = n.op("Reshape", x, n.weight(np.array([-1, 4])))
    n.op("Gemm", x, n.normal(4, 2), transA=0, name="y")
    artifact = n.artifact({"x": ["N", 4, 6, 6]}, {"y": ["N", 2]})
    assert [layer.name for layer in layers(load_model(artifact))] == ["y"]


def test_a_layer_alone_is_the_layer() -> None:
    artifact = convolution(strides=[2, 1], pads=[1, 1, 1, 1])
    (layer,) = layers(load_model(artifact))
    x = np.random.default_rng(0).standard_normal((3, 4, 13, 14)).astype(np.float32)
    want = run(artifact, x)
    for form in (None, *SplitForm):
        factors = [layer.weight] if form is None else whole(layer.weight, form).factors
        got = run(alone(layer, form, factors, x.shape), x)
        np.testing.assert_allclose(got, want, atol=ROUNDING * np.abs(want).max())
    assert isinstance(layer.node, ir.Node)


def test_every_way_to_run_a_convolution_is_timed_at_its_shape() -> None:
    n = Network()
    n.op("Relu", n.conv("x", 8, 8), name="y")
    (layer,) = layers(load_model(n.artifact({"x": [1, 8, 6, 6]}, {"y": [1, 8, 6, 6]})))
    ways = [WHOLE, (SplitForm.CHANNEL, (2,)), (SplitForm.SPATIAL, (2,)), (SplitForm.TUCKER, (2, 3))]
    found = measure(layer, (1, 8, 6, 6), ways, threads=1)
    assert list(found) == ways
    assert all(milliseconds > 0 for milliseconds in found.values())
