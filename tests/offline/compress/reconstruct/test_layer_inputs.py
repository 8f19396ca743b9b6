"""The rows of a layer's input are what the layer multiplies by its weights; the moments are those of the rows."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.offline.compress.ptq.qdq_placement import float_model
from penstock.offline.compress.reconstruct import layer_inputs
from penstock.offline.compress.reconstruct.layer_inputs import layer_input, observe
from penstock.offline.compress.taps import Taps
from penstock.offline.sessions import loaded

ALL = 10**6


def answer(artifact: Artifact, x: np.ndarray) -> np.ndarray:
    with loaded(artifact, as_written=True) as model:
        return model.forward({"x": x})["y"]


def only_node(artifact: Artifact) -> onnx.NodeProto:
    return float_model(artifact).nodes[-1]


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_convolution_is_a_product_with_its_rows(data):
    rank, groups, samples = (data.draw(st.integers(1, most)) for most in (3, 3, 3))
    along = st.lists(st.integers(1, 3), min_size=rank, max_size=rank)
    kernel, strides, dilations = (data.draw(along) for _ in range(3))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank))
    inputs, outputs = (groups * data.draw(st.integers(1, 3)) for _ in range(2))
    given = {"group": groups, "strides": strides, "dilations": dilations}
    auto = data.draw(st.sampled_from(["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if auto == "NOTSET":
        given["pads"] = data.draw(st.lists(st.integers(0, 2), min_size=2 * rank, max_size=2 * rank))
    else:
        given["auto_pad"] = auto
        assume(auto == "VALID" or set(dilations) == {1})  # ONNX Runtime and the standard differ
    rng = np.random.default_rng(0)
    n, weight = Network(), rng.standard_normal((outputs, inputs // groups, *kernel)).astype(np.float32)
    n.op("Conv", "x", n.weight(weight), name="y", **given)
    x = rng.standard_normal((samples, inputs, *sizes)).astype(np.float32)
    try:
        artifact = n.artifact({"x": ["N", *x.shape[1:]]}, {"y": ["N", outputs, *(f"d{at}" for at in range(rank))]})
        want = answer(artifact, x)
    except Exception:  # noqa: BLE001 - the kernel is larger than the input
        want = np.zeros((samples, outputs, *(0 for _ in range(rank))), np.float32)
    source = layer_input(only_node(artifact), weight.shape)
    rows = source.rows(x, ALL)
    assert rows.shape == (groups, samples * math.prod(want.shape[2:]), math.prod(weight.shape[1:]))
    got = rows @ weight.reshape(groups, outputs // groups, -1).swapaxes(1, 2)
    positions = math.prod(want.shape[2:])
    got = got.reshape(groups, samples, positions, outputs // groups).transpose(1, 0, 3, 2).reshape(want.shape)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_has_the_rows_of_its_last_axis(transposed):
    n = Network()
    if transposed:
        n.op("Gemm", "x", n.normal(3, 4), name="y", transB=1)
    else:
        n.op("MatMul", "x", n.normal(4, 3), name="y")
    artifact = n.artifact(
        {"x": ["N", 4] if transposed else ["N", "L", 4]}, {"y": ["N", 3] if transposed else ["N", "L", 3]}
    )
    source = layer_input(only_node(artifact), (3, 4) if transposed else (4, 3))
    x = np.arange(24, dtype=np.float32).reshape((6, 4) if transposed else (2, 3, 4))
    np.testing.assert_array_equal(source.rows(x, ALL), np.arange(24).reshape(1, 6, 4))
    some = source.rows(x, 4)
    assert some.shape == (1, 4, 4)
    assert (np.diff(some[0, :, 0]) > 0).all()


def conv(batch: int | str = "N") -> Artifact:
    n = Network()
    n.op("Conv", "x", n.normal(4, 1, 3, 3), name="y", group=2, pads=[1, 1, 1, 1])
    return n.artifact({"x": [batch, 2, 5, 5]}, {"y": [batch, 4, 5, 5]})


@pytest.mark.parametrize("count", [1, 8, 20])
def test_the_moments_are_of_all_rows_if_these_are_few(count):
    artifact = conv()
    x = np.random.default_rng(0).standard_normal((count, 2, 5, 5)).astype(np.float32)
    source = layer_input(only_node(artifact), (4, 1, 3, 3))
    found = observe(Taps(artifact, make_dataset({"x": x}, None)), [source, source])[source]
    rows = source.rows(x, ALL)
    np.testing.assert_allclose(found.fit + found.held_out, rows.swapaxes(1, 2) @ rows, rtol=1e-4)
    assert 0 < np.trace(found.held_out[0]) < np.trace(found.fit[0])
    assert source.moment_bytes == sum(one.nbytes for one in found)


def test_reading_ends_early_and_rows_are_bounded(monkeypatch):
    artifact, calls = conv(), []
    x = np.random.default_rng(0).standard_normal((320, 2, 5, 5)).astype(np.float32)
    source = layer_input(only_node(artifact), (4, 1, 3, 3))
    monkeypatch.setattr(
        layer_inputs.LayerInput, "rows", lambda self, array, most: calls.append(most) or np.ones((2, 1, 9), np.float32)
    )
    observe(Taps(artifact, make_dataset({"x": x}, None)), [source])
    assert calls == [math.ceil(1024 / 10)] * 10
    calls.clear()
    observe(Taps(artifact, make_dataset({"x": x}, None)), [source], lambda: len(calls) == 2)
    assert len(calls) == 2
