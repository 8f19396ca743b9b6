"""N of M: the pattern, compared with a plain loop, along the correct axis."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from networks import Network, cnn, mlp
from penstock.artifact import Artifact
from penstock.errors import InvalidConfig
from penstock.offline.compress.pruning.n_m import NMOptions, n_m_mask, prune_n_m


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
        assert 0.5 < pattern[name]["kept"] < 1
    assert (arrays["w5"] != 0).all()
    assert "4 does not divide its 5" in pattern["w5"]["left_alone"]
    assert pruned.provenance[-1].facts["faster_on_cpu"] is False


@pytest.mark.parametrize("make", [mlp, cnn])
def test_kept_weights_stay_in_place(make: Callable[[], Artifact]) -> None:
    artifact = make()
    pruned = prune_n_m(artifact)
    assert prune_n_m(artifact).digest == pruned.digest
    before, after = _arrays(artifact), _arrays(pruned)
    for name, layer in pruned.provenance[-1].facts["pattern"].items():
        kept = after[name] != 0
        assert np.array_equal(after[name][kept], before[name][kept])
        if "kept" in layer:
            share = np.abs(after[name]).sum() / np.abs(before[name]).sum()
            assert layer["kept"] == pytest.approx(share, abs=1e-5)


def test_a_weight_with_two_axes_to_sum_over_is_left_alone() -> None:
    n = Network()
    w = n.normal(8, 8)
    n.op("Gemm", n.op("Gemm", "x", w), w, name="y", transB=1)
    pruned = prune_n_m(n.artifact({"x": ["N", 8]}, {"y": ["N", 8]}))
    assert "different axes" in pruned.provenance[-1].facts["pattern"][w]["left_alone"]
    assert (_arrays(pruned)[w] != 0).all()


def test_n_is_below_m() -> None:
    with pytest.raises(InvalidConfig, match="n is 4 and m is 4"):
        prune_n_m(mlp(), NMOptions(n=4, m=4))
