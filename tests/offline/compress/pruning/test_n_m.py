"""N of M: the pattern against a plain loop, along the right axis, and orders of channels that keep more."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from networks import Network, cnn, mlp
from penstock.artifact import Artifact
from penstock.errors import InvalidConfig
from penstock.offline.compress.pruning.n_m import NMOptions, find_order, kept_share, n_m_mask, prune_n_m


def _arrays(artifact: Artifact) -> dict[str, np.ndarray]:
    proto = onnx.load_model_from_string(artifact.data)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@given(st.integers(1, 4), st.lists(st.integers(-3, 3), min_size=24, max_size=24))
def test_the_mask_against_a_plain_loop(n: int, values: list[int]) -> None:
    rows = np.array(values, np.float32).reshape(2, 12)
    wanted = np.zeros((2, 12), bool)
    for row in range(2):
        for start in range(0, 12, 6):
            ranked = sorted(range(start, start + 6), key=lambda at: (-abs(rows[row, at]), at))
            wanted[row, ranked[:n]] = True
    assert np.array_equal(n_m_mask(rows, n, 6), wanted)


def _per_group(array: np.ndarray, axis: int, m: int = 4) -> np.ndarray:
    return (np.moveaxis(array, axis, -1).reshape(-1, m) != 0).sum(axis=1)


def test_every_weight_along_its_input_channels() -> None:
    n = Network()
    x = n.op("Relu", n.conv("x", 8, 12))
    x = n.op("ConvTranspose", x, n.normal(12, 8, 2, 2))
    x = n.op("Flatten", n.op("GlobalAveragePool", x))
    x = n.op("Gemm", x, n.normal(16, 8), transB=1)
    x = n.op("MatMul", x, n.normal(16, 5))
    n.op("MatMul", n.normal(3, 5), n.op("Transpose", x, perm=[1, 0]), name="y")
    pruned = prune_n_m(n.artifact({"x": ["N", 8, 6, 6]}, {"y": [3, "N"]}))
    arrays, pattern = _arrays(pruned), pruned.provenance[-1].facts["pattern"]
    for name, axis in {"w0": 1, "w2": 0, "w3": 1, "w4": 0}.items():
        assert (_per_group(arrays[name], axis) == 2).all(), name
        assert 0.5 < pattern[name]["kept_in_order"] <= pattern[name]["kept"] < 1
    assert (arrays["w5"] != 0).all()
    assert "4 does not divide its 5" in pattern["w5"]["left_alone"]
    assert pruned.provenance[-1].facts["faster_on_cpu"] is False


def test_a_better_order_is_found_and_is_exact() -> None:
    """Large columns side by side would crowd one another out; apart they all stay."""
    rng = np.random.default_rng(0)
    rows = rng.uniform(0.9, 1.1, (6, 16)) * np.where(np.arange(16) < 8, 100.0, 1.0)
    options = NMOptions()
    order = find_order(rows, options)
    assert sorted(order) == list(range(16))
    assert kept_share(rows, options) < 0.6
    assert kept_share(rows[:, order], options) > 0.98
    assert ((order.reshape(-1, 4) < 8).sum(axis=1) == 2).all()
    assert np.array_equal(find_order(rows, NMOptions(comparisons=0)), np.arange(16))


@pytest.mark.parametrize("make", [mlp, cnn])
def test_searching_keeps_more_of_the_same_weights(make: object) -> None:
    artifact: Artifact = make()  # type: ignore[operator]
    ordered, searched = (prune_n_m(artifact, NMOptions(comparisons=count)) for count in (0, 4000))
    before, after = (a.provenance[-1].facts for a in (ordered, searched))
    assert before["nonzero"] == after["nonzero"]
    gains = [layer["kept"] - layer["kept_in_order"] for layer in after["pattern"].values() if "kept" in layer]
    assert min(gains) >= 0
    assert max(gains) > 0
    assert all(layer["kept"] == layer["kept_in_order"] for layer in before["pattern"].values() if "kept" in layer)
    assert prune_n_m(artifact).digest == searched.digest
    for name, array in _arrays(artifact).items():
        # What is left are weights of the original, at other places.
        assert np.isin(_arrays(searched)[name], np.append(array, 0)).all()


def test_a_weight_with_two_axes_to_sum_over_is_left_alone() -> None:
    n = Network()
    w = n.normal(8, 8)
    n.op("Gemm", n.op("Gemm", "x", w), w, name="y", transB=1)
    pruned = prune_n_m(n.artifact({"x": ["N", 8]}, {"y": ["N", 8]}))
    assert "different axes" in pruned.provenance[-1].facts["pattern"][w]["left_alone"]
    assert (_arrays(pruned)[w] != 0).all()


def test_n_is_below_m() -> None:
    with pytest.raises(InvalidConfig, match="4 of 4"):
        prune_n_m(mlp(), NMOptions(n=4, m=4))
