"""Any one tensor rounded, in one session: the same as a model in which only that tensor is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import networks
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.offline.compress.ptq.histogram import Range
from penstock.offline.compress.ptq.placement import FloatModel
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.ptq.switches import OFF, SwitchedModel, with_switches
from penstock.tensor import Array, DataType

U8 = IntegerScheme(DataType.UINT8, DataType.INT8, False, "test")
S8 = IntegerScheme(DataType.INT8, DataType.INT8, False, "test")
SYMMETRIC = IntegerScheme(DataType.INT8, DataType.INT8, False, "test", symmetric=True)
X = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
RANGE = Range(-0.5, 1.5)


def switched(scheme: IntegerScheme) -> SwitchedModel:
    proto = with_switches(FloatModel(networks.mlp()), {"x": 0, "hidden": 1}, scheme)
    onnx.checker.check_model(proto)
    model = get_engine("onnxruntime").load(Artifact.from_bytes(proto.SerializeToString()), {"threads": 1})
    return SwitchedModel(model, scheme)


def rounded(array: Array, scheme: IntegerScheme, range: Range) -> Array:
    """By the definition, in a plain way; the operator clips to all integers of the type, of which symmetric ranges mean one less."""
    smallest, largest = scheme.activation_limits
    lowest = 0 if scheme.activation is DataType.UINT8 else -128
    scale = np.float32((range.high - range.low) / (largest - smallest))
    zero = 0 if scheme.symmetric else round(smallest - range.low / float(scale))
    return (np.clip(np.round(array / scale) + zero, lowest, largest) - zero).astype(np.float32) * scale


@pytest.mark.parametrize("scheme", [U8, S8, SYMMETRIC], ids=["u8", "s8", "symmetric"])
def test_one_tensor_is_rounded_and_the_others_are_not(scheme: IntegerScheme) -> None:
    range = Range(-1.5, 1.5) if scheme.symmetric else RANGE
    model, plain = switched(scheme), get_engine("onnxruntime").load(networks.mlp(), {"threads": 1})
    assert model.signature.input_names == ["x"]
    model.set(OFF, range)
    np.testing.assert_allclose(model.forward({"x": X})["y"], plain.forward({"x": X})["y"], rtol=1e-5, atol=1e-6)
    model.set(0, range)
    wanted = plain.forward({"x": rounded(X, scheme, range)})["y"]
    # Where x / scale is half an integer to the last bit, the two may round to different sides: a step of one in 255.
    np.testing.assert_allclose(model.forward({"x": X})["y"], wanted, atol=1e-4)
    model.set(1, range)
    other = model.forward({"x": X})["y"]
    assert np.abs(other - wanted).max() > 1e-3
    model.unload()


def test_a_tensor_read_by_several_and_beside_them() -> None:
    n = networks.Network()
    n.op("Add", n.op("MatMul", "x", n.weight(np.eye(4, dtype=np.float32))), "x", name="y")
    artifact = n.artifact({"x": ["N", 4]}, {"y": ["N", 4]})
    proto = with_switches(FloatModel(artifact), {"x": 5}, U8)
    model = SwitchedModel(get_engine("onnxruntime").load(Artifact.from_bytes(proto.SerializeToString()), {}), U8)
    model.set(5, Range(0.0, 1.0))
    x = np.float32([[0.1, 2.0, -1.0, 1.0]])
    np.testing.assert_allclose(model.forward({"x": x})["y"], 2 * rounded(x, U8, Range(0.0, 1.0)), atol=1e-6)
