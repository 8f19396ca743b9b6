"""Masters and logarithms start at the integers' values, follow the formulas, and are written back as computed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from networks import attention, cnn, mlp
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import Unsupported
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.training.fake_quantize import FakeQuantization
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.tensor import DataType

SCHEMES = {
    "u8s8": IntegerScheme(DataType.UINT8, DataType.INT8, False, ""),
    "reduced": IntegerScheme(DataType.UINT8, DataType.INT8, True, ""),
    "s8s8": IntegerScheme(DataType.INT8, DataType.INT8, False, ""),
}
NETS = {
    "mlp": (mlp, (32, 16)),
    "cnn": (cnn, (8, 3, 12, 12)),
    "attention": (attention, (8, 5, 32)),
}


def quantised(
    net: str, scheme: str = "u8s8", placement: QdqPlacement = QdqPlacement.LINEAR
) -> tuple[Artifact, Artifact, Dataset]:
    build, shape = NETS[net]
    artifact = build()
    data = make_dataset({"x": np.random.default_rng(2).normal(size=shape).astype(np.float32)}, None)
    found = ranges(collect(artifact, data.inputs), RangeMethod.MIN_MAX, SCHEMES[scheme])
    return artifact, quantize(artifact, found, SCHEMES[scheme], placement), data


def floats_of(artifact: Artifact) -> dict[str, np.ndarray]:
    return {name: numpy_helper.to_array(tensor) for name, tensor in FloatModel(artifact).weights.items()}


def constants_of(artifact: Artifact) -> dict[str, np.ndarray]:
    graph = onnx.load_model_from_string(artifact.data).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def hooked(original: Artifact, quantized: Artifact, data: Dataset) -> tuple[TrainableModel, FakeQuantization]:
    model = TrainableModel(quantized)
    return model, FakeQuantization(model, floats_of(original), data)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("placement", QdqPlacement)
def test_it_starts_at_the_very_integers_and_scales(net: str, scheme: str, placement: QdqPlacement) -> None:
    original, quantized, data = quantised(net, scheme, placement)
    model, fake = hooked(original, quantized, data)
    before, after = constants_of(quantized), constants_of(model.to_artifact("x", {}, {}))
    for name, array in before.items():
        assert after[name].dtype == array.dtype
        if not name.endswith("_quantized_scale"):
            np.testing.assert_array_equal(after[name], array, err_msg=name)
        # A bias has the product of the other two scales, rounded once more or less.
        np.testing.assert_allclose(after[name], array, rtol=1e-6)
    weights = [name for name, array in before.items() if array.dtype == np.int8 and array.ndim > 1]
    assert fake.from_floats == len(weights) > 0
    biases = [name for name, array in before.items() if array.dtype == np.int32 and name.endswith("_quantized")]
    assert fake.masters.keys() == {*weights, *biases}
    activations = {name for name, array in before.items() if name.endswith("_scale") and array.ndim == 0}
    assert activations <= fake.logarithms.keys()


def test_weights_are_rounded_masters_and_their_step_is_learned_as_the_paper_says() -> None:
    original, quantized, data = quantised("mlp")
    model, fake = hooked(original, quantized, data)
    name = "w2_quantized"
    scale = model.constant("w2_scale").detach()
    master = fake.masters[name]
    with torch.no_grad():
        master.copy_(torch.randn(master.shape, generator=torch.Generator().manual_seed(1)) * scale * 90)
    value = model.constant(name) * model.constant("w2_scale")
    weight = torch.randn(value.shape, generator=torch.Generator().manual_seed(2))
    (value * weight).sum().backward()
    ratio = (master / scale).detach().double()
    inside = torch.round(ratio).abs() <= 127
    assert 0.02 < float((~inside).double().mean()) < 0.5
    expected = torch.where(inside, weight, 0.0)
    torch.testing.assert_close(master.grad, expected.float())
    # Esser et al. (2020), eq. 3, over the column of each channel; times s for its logarithm, rate, and 1/sqrt(n q).
    slope = torch.where(inside, torch.round(ratio) - ratio, torch.clamp(ratio, -127, 127))
    wanted = (slope * weight).sum(0) * scale.double() * 100 / np.sqrt(64 * 127)
    torch.testing.assert_close(fake.logarithms["w2_scale"].grad.double(), wanted, rtol=1e-3, atol=1e-5)


def test_a_bias_follows_the_scales_of_input_and_weight() -> None:
    original, quantized, data = quantised("mlp")
    model, fake = hooked(original, quantized, data)
    with torch.no_grad():
        fake.logarithms["hidden_scale"].fill_(0.002)
        fake.logarithms["w2_scale"].copy_(torch.linspace(-0.01, 0.01, 64))
        fake.masters["w3_quantized"].add_(0.125)
    before, after = constants_of(quantized), constants_of(model.to_artifact("x", {}, {}))
    np.testing.assert_allclose(after["hidden_scale"], before["hidden_scale"] * np.exp(0.2), rtol=1e-5)
    np.testing.assert_allclose(after["w3_quantized_scale"], after["hidden_scale"] * after["w2_scale"], rtol=1e-6)
    step = after["w3_quantized_scale"].astype(np.float64)
    bias = before["w3_quantized"] * before["w3_quantized_scale"].astype(np.float64) + 0.125
    assert np.abs(after["w3_quantized"] * step - bias).max() <= 0.51 * step.max()
    assert after["w3_quantized"].dtype == np.int32


def test_seven_bits_stay_seven_bits() -> None:
    original, quantized, data = quantised("mlp", "reduced")
    model, fake = hooked(original, quantized, data)
    with torch.no_grad():
        for master in fake.masters.values():
            master.mul_(100)
    after = constants_of(model.to_artifact("x", {}, {}))
    weights = [array for array in after.values() if array.dtype == np.int8 and array.ndim == 2]
    assert max(np.abs(array.astype(int)).max() for array in weights) == 64


def test_shared_scales_stay_shared() -> None:
    """A Transpose keeps its input's scale; both QuantizeLinear read the same constant."""
    original, quantized, data = quantised("attention", placement=QdqPlacement.WIDE)
    model, fake = hooked(original, quantized, data)
    graph = onnx.load_model_from_string(quantized.data).graph
    readers = [node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[1] == "k_scale"]
    assert len(readers) == 2
    assert sum(name == "k_scale" for name in fake.logarithms) == 1
    model({"x": torch.tensor(data.inputs["x"])})["y"].sum().backward()
    assert float(fake.logarithms["k_scale"].grad.abs()) > 0


def test_without_the_floats_it_starts_from_the_integers() -> None:
    _, quantized, data = quantised("mlp")
    model = TrainableModel(quantized)
    fake = FakeQuantization(model, {"w0": np.zeros((16, 64), np.float32)}, data)
    assert fake.from_floats == 0
    after = constants_of(model.to_artifact("x", {}, {}))
    np.testing.assert_array_equal(after["w0_quantized"], constants_of(quantized)["w0_quantized"])


def test_frozen_scales_learn_no_more() -> None:
    original, quantized, data = quantised("mlp")
    model, fake = hooked(original, quantized, data)
    for frozen in (True, False):
        fake.freeze_scales(frozen)
        model({"x": torch.tensor(data.inputs["x"])})["y"].sum().backward()
        assert all((logarithm.grad is None) is frozen for logarithm in fake.logarithms.values())


def test_a_float_model_is_refused() -> None:
    _, _, data = quantised("mlp")
    with pytest.raises(Unsupported, match="no integer weights"):
        FakeQuantization(TrainableModel(mlp()), {}, data)
