from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import networks
from penstock.offline.compress.precision.sqnr import (
    Noise,
    activation_noise,
    channel_noise,
    histogram_noise,
    noisiest,
    weight_noise,
)
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.histogram import Histogram, Range
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, min_max_range, mse_range, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import Array, DataType

UNSIGNED = IntegerScheme(DataType.UINT8, DataType.INT8, False, "test")
REDUCED = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
SIGNED = IntegerScheme(DataType.INT8, DataType.INT8, False, "test")
SCHEMES = {"unsigned": UNSIGNED, "signed": SIGNED}


def histogram_of(x: Array) -> Histogram:
    histogram = Histogram()
    histogram.update(x)
    return histogram


def oracle(x: Array, range: Range, scheme: IntegerScheme) -> Noise:
    """Quantise every value, and split its error at the largest and smallest integer."""
    x = x.astype(np.float64).reshape(-1)
    smallest, largest = scheme.activation_limits
    scale = (range.high - range.low) / 255
    zero_point = round(smallest - range.low / scale)
    inside = np.clip(x, (smallest - zero_point) * scale, (largest - zero_point) * scale)
    rounded = (np.clip(np.round(x / scale) + zero_point, smallest, largest) - zero_point) * scale
    return Noise(float((x**2).mean()), float(((x - inside) ** 2).mean()), float(((inside - rounded) ** 2).mean()))


TENSORS = {
    "normal": np.random.default_rng(0).standard_normal(40_000),
    "relu": np.maximum(np.random.default_rng(1).standard_normal(40_000), 0),
    "long tails": np.random.default_rng(2).standard_t(4, 40_000),
    "shifted": np.random.default_rng(3).gamma(2.0, 1.0, 40_000) - 0.5,
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("cut", [1.0, 0.3])
def test_the_histogram_tells_the_noise_of_the_tensor(name: str, scheme: IntegerScheme, cut: float) -> None:
    x = TENSORS[name].astype(np.float32)
    histogram = histogram_of(x)
    widest = min_max_range(histogram)
    range = Range(widest.low * cut, widest.high * cut)
    found, want = histogram_noise(histogram, range, scheme), oracle(x, range, scheme)
    # Values inside a bin are taken to be spread evenly: 40,000 of them leave some per cent of the noise open, 2 % is 0.1 dB.
    assert found.sqnr_db == pytest.approx(want.sqnr_db, abs=0.1)
    assert found.signal == pytest.approx(want.signal, rel=1e-3)
    assert found.clipping_share == pytest.approx(want.clipping_share, abs=0.02)
    assert (found.clipping > 0.001 * found.rounding) == (cut < 1)


def test_the_integrals_are_exact() -> None:
    # A bin's values lie all over it, evenly: then its integral is that of the tensor.
    x = (np.arange(-204_800, 204_800) + 0.5) / 204_800
    for range in (Range(-1.0, 1.0), Range(-0.37, 0.61), Range(0.0, 0.5), Range(-3.0, 5.0)):
        found, want = histogram_noise(histogram_of(x), range, UNSIGNED), oracle(x, range, UNSIGNED)
        for one, other in zip(
            (found.signal, found.clipping, found.rounding), (want.signal, want.clipping, want.rounding), strict=True
        ):
            assert one == pytest.approx(other, rel=2e-3, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30),
    st.floats(1e-3, 1e4),
    st.floats(0, 1e4),
    st.sampled_from([UNSIGNED, SIGNED]),
)
def test_any_tensor_has_a_noise(values: list[float], high: float, low: float, scheme: IntegerScheme) -> None:
    found = histogram_noise(histogram_of(np.float32(values)), Range(-low, high), scheme)
    assert -200 <= found.sqnr_db <= 200
    assert found.clipping >= 0
    assert found.rounding >= 0
    # Rounding is by half a step at most; the closed form may miss by what cancels in it.
    step = (high + low) / 255
    assert found.rounding <= (step / 2) ** 2 * (1 + 1e-6)


def test_a_constant_and_a_tensor_of_zeros() -> None:
    constant = histogram_noise(histogram_of(np.full(10, 0.7, np.float32)), Range(0.0, 0.7), UNSIGNED)
    assert constant.sqnr_db > 60
    zeros = histogram_noise(histogram_of(np.zeros(10, np.float32)), Range(0.0, 0.0), UNSIGNED)
    assert (zeros.signal, zeros.clipping, zeros.rounding, zeros.sqnr_db) == (0, 0, 0, 200)
    assert zeros.clipping_share == 0


def test_a_full_range_gives_six_decibels_a_bit() -> None:
    x = np.random.default_rng(0).uniform(0, 1, 100_000).astype(np.float32)
    found = histogram_noise(histogram_of(x), Range(0.0, 1.0), UNSIGNED)
    # Uniform over 255 steps: signal 1/3, noise (1/255)²/12.
    assert found.sqnr_db == pytest.approx(10 * math.log10(4 * 255**2), abs=0.05)


@pytest.mark.parametrize("scheme", [UNSIGNED, REDUCED], ids=["8 bits", "7 bits"])
@pytest.mark.parametrize("network", ["cnn", "mlp"])
def test_weights_have_the_noise_of_the_written_model(network: str, scheme: IntegerScheme) -> None:
    artifact = {"cnn": networks.cnn(8), "mlp": networks.mlp()}[network]
    x = networks.images(8) if network == "cnn" else np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    known = ranges(collect(artifact, {"x": x}), RangeMethod.MIN_MAX, scheme)
    model = FloatModel(artifact)
    found = weight_noise(model, model.integer_nodes(QdqPlacement.LINEAR), scheme)
    assert len(found) == {"cnn": 4, "mlp": 3}[network]
    graph = onnx.load_model_from_string(quantize(artifact, known, scheme).data).graph
    written = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for name, noise in found.items():
        weight = numpy_helper.to_array(model.weights[name]).astype(np.float64)
        integers = written[f"{name}_quantized"].astype(np.float64)
        scale = written[f"{name}_scale"].astype(np.float64)
        axis = 0 if network == "cnn" and weight.ndim == 4 else 1
        error = integers * scale.reshape([-1 if at == axis else 1 for at in range(weight.ndim)]) - weight
        # The writer's scales are FP32, so that a tie may round the other way.
        assert noise.rounding == pytest.approx(float((error**2).mean()), rel=1e-3)
        assert noise.clipping == 0


def test_the_noisiest_tensor_is_found() -> None:
    artifact = networks.cnn(8)
    statistics = collect(artifact, {"x": networks.images(8)})
    known = {name: mse_range(one.histogram, UNSIGNED) for name, one in statistics.items()}
    noises = activation_noise(statistics, {name: known[name] for name in list(known)[1:]}, UNSIGNED)
    assert set(noises) == set(list(known)[1:])
    worst = noisiest(noises)
    assert worst is not None
    assert worst.sqnr_db == min(noise.sqnr_db for noise in noises.values())
    assert noisiest({}) is None


def test_a_channel_of_zeros_adds_no_noise() -> None:
    weight = np.zeros((3, 4), np.float32)
    weight[1] = [0.1, -0.5, 0.3, 1.0]
    noise = channel_noise(weight, 0, UNSIGNED)
    assert 0 < noise.rounding < (1 / 254) ** 2
