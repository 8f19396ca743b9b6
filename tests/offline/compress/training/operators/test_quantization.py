from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from networks import Network
from one_node import Const, agree, floats
from penstock.artifact import Artifact
from penstock.offline.compress.training.operators.quantization import round_through, scaled_gradient
from penstock.offline.compress.training.torch import torch
from penstock.offline.compress.training.trainable import TrainableModel

_KINDS = {np.uint8: TensorProto.UINT8, np.int8: TensorProto.INT8}


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("scale", [0.01, 0.0371, 1.0])
def test_quantize_equals_onnx_runtime_bit_by_bit(dtype: type, scale: float) -> None:
    x = np.concatenate(
        [floats(50_000), np.arange(-300, 300, dtype=np.float32) * np.float32(scale) / 2, [np.inf, -np.inf]]
    )
    agree("QuantizeLinear", x.astype(np.float32), Const(scale, np.float32), Const(3, dtype), kinds=(_KINDS[dtype],))


def test_quantize_without_zero_point_is_unsigned() -> None:
    agree("QuantizeLinear", floats(40), Const(0.01, np.float32), kinds=(TensorProto.UINT8,))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_per_axis(axis: int, dtype: type) -> None:
    x = floats(4, 4, 4)
    scale, zero = Const([0.01, 0.02, 0.3, 0.005], np.float32), Const([0, 3, 7, 100], dtype)
    agree("QuantizeLinear", x, scale, zero, axis=axis, kinds=(_KINDS[dtype],))
    agree("DequantizeLinear", (x * 50).astype(np.int8).astype(dtype), scale, zero, axis=axis, tolerance=0)


def test_dequantize_wide_integers() -> None:
    x = np.array([2**31 - 1, -(2**31), 2**24 + 1, 5], np.int32)
    agree("DequantizeLinear", x, Const(1e-4, np.float32), tolerance=0)


def _pair(scale: float, zero: int) -> TrainableModel:
    n = Network()
    s, z = n.weight(np.float32(scale)), n.weight(np.uint8(zero))
    n.op("DequantizeLinear", n.op("QuantizeLinear", "x", s, z, name="q"), s, z, name="y")
    return TrainableModel(n.artifact({"x": ["N"]}, {"y": ["N"]}), trained=["w0"])


def test_gradients_are_those_of_learned_step_sizes() -> None:
    """Esser et al. 2020, eq. 3, with the range shifted by the zero point."""
    scale, zero = 0.1, 20
    model = _pair(scale, zero)
    x = torch.tensor([-9.0, -1.97, -0.44, 0.0, 0.26, 7.0, 23.3, 99.0], requires_grad=True)
    model({"x": x})["y"].backward(torch.arange(1.0, 9.0))
    v = x.detach().double().numpy() / scale
    low, high = -zero, 255 - zero
    inside = (v > low) & (v < high)
    to_scale = np.where(inside, np.round(v) - v, np.clip(v, low, high))
    np.testing.assert_array_equal(x.grad.numpy(), np.where(inside, np.arange(1, 9), 0))
    np.testing.assert_allclose(float(model.weights["w0"].grad), (to_scale * np.arange(1, 9)).sum(), rtol=1e-5)


def test_scales_are_trained_only_on_demand() -> None:
    n = Network()
    n.op(
        "DequantizeLinear",
        n.weight(np.arange(4, dtype=np.int8)),
        n.weight(np.full(4, 0.1, np.float32)),
        name="d",
        axis=0,
    )
    n.op("Mul", "x", "d", name="y")
    artifact = n.artifact({"x": ["N", 4]}, {"y": ["N", 4]})
    assert not TrainableModel(artifact).weights
    assert list(TrainableModel(artifact, trained=["w1"]).weights) == ["w1"]


def test_rounding_lets_gradients_through() -> None:
    x = torch.tensor([-2.5, -0.5, 0.4, 0.5, 1.5, 100.4], requires_grad=True)
    y = round_through(x)
    y.sum().backward()
    assert y.tolist() == [-2.0, -0.0, 0.0, 0.0, 2.0, 100.0]
    assert x.grad.tolist() == [1.0] * 6


def test_scaled_gradient_keeps_the_scale() -> None:
    scale = torch.tensor(0.3, requires_grad=True)
    seen = scaled_gradient(100, 127)(scale)
    seen.backward()
    assert torch.equal(seen, scale)
    assert float(scale.grad) == pytest.approx((100 * 127) ** -0.5)


def test_a_quantised_output_is_of_its_type() -> None:
    n = Network()
    n.op("QuantizeLinear", "x", n.weight(np.float32(0.1)), n.weight(np.int8(0)), name="q")
    artifact = n.artifact({"x": ["N"]}, {"q": ["N"]})
    proto = onnx.load_model_from_string(artifact.data)
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.INT8
    model = TrainableModel(Artifact.from_bytes(proto.SerializeToString()))
    assert model({"x": torch.tensor([1.0])})["q"].dtype == torch.int8
