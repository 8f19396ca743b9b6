"""SmoothQuant, compared with its formula, and its purpose: INT8 after a LayerNormalization with outlier channels."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import networks
import outliers
from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.offline.compress.ptq.rescale import Rescaling
from penstock.offline.compress.ptq.smooth_quant import Seen, quantized_error, smooth_quant
from penstock.offline.compress.taps import Taps
from penstock.offline.optimize.model import infer_shapes, read_proto

DATA = outliers.tokens(64)


def weights(artifact: Artifact) -> dict[str, np.ndarray]:
    graph = onnx.load_model_from_string(artifact.data).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def test_the_scales_are_the_papers_formula_over_all_readers() -> None:
    uneven = outliers.attention(50.0)
    smooth = smooth_quant(uneven, DATA)
    old, new = weights(uneven), weights(smooth)
    (link,) = smooth.provenance[-1].facts["links"].values()
    alpha = link["alpha"]
    x = DATA.inputs["x"].astype(float)
    normal = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    read = normal * old["w0"] + old["w1"]
    for j in range(32):
        largest = max(np.abs(old[name][j]).max() for name in ("w2", "w3", "w4"))
        s = np.abs(read[..., j]).max() ** alpha / largest ** (1 - alpha)
        for name in ("w2", "w3", "w4"):
            np.testing.assert_allclose(new[name][j], old[name][j] * s, rtol=1e-4)
        np.testing.assert_allclose([new["w0"][j], new["w1"][j]], [old["w0"][j] / s, old["w1"][j] / s], rtol=1e-4)


@pytest.mark.parametrize("decomposed", [True, False])
def test_outlier_channels_are_rescued(decomposed: bool) -> None:
    even, uneven = outliers.attention(1.0, decomposed), outliers.attention(50.0, decomposed)
    smooth = smooth_quant(uneven, DATA)
    evaluate = outliers.tokens(64, seed=1)
    before, after = (outliers.error(outliers.int8(a, DATA), even, evaluate) for a in (uneven, smooth))
    assert before > 5 * after
    facts = smooth.provenance[-1].facts
    (link,) = facts["links"].values()
    assert len(link["readers"]) == 3
    assert link["error"][1] < link["error"][0] / 5
    assert facts["max_relative_error"] < 1e-5


def test_the_error_is_that_of_the_integer_model() -> None:
    """One product in ONNX Runtime, quantised by min-max, against ``quantized_error``."""
    n = Network(4)
    x = n.op("LayerNormalization", "x", n.normal(32), n.normal(32))
    n.op("MatMul", x, n.normal(32, 24), name="y")
    artifact = n.artifact({"x": ["N", 5, 32]}, {"y": ["N", 5, 24]})
    (link,) = Rescaling(infer_shapes(read_proto(artifact))).links
    ((_, array),) = Taps(artifact, DATA, batch_size=DATA.count).run([link.reads[0].tensor])
    rows = array.reshape(-1, 32).astype(np.float64)
    low, high = np.minimum(rows.min(0), 0), np.maximum(rows.max(0), 0)
    want = outliers.error(outliers.int8(artifact, DATA), artifact, DATA)
    assert quantized_error(link, Seen(low, high, rows), np.ones(32)) == pytest.approx(want, rel=0.02)


def residual(outlier: float) -> Artifact:
    """As after the LayerNormalization of post-norm encoders: an addition reads the tensor that two products read."""
    rng = np.random.default_rng(0)
    n = Network(4)
    s = np.ones(32)
    s[[3, 17]] = outlier
    x = n.op("LayerNormalization", "x", n.weight(s.astype(np.float32)), n.weight(np.zeros(32, np.float32)))
    q, k = (n.op("MatMul", x, n.weight((rng.normal(0, 1, (32, 32)) / s[:, None]).astype(np.float32))) for _ in "qk")
    even = n.op("Mul", x, n.weight((1 / s).astype(np.float32)))
    n.op("Add", n.op("Add", q, n.op("Sigmoid", k)), even, name="y")
    return n.artifact({"x": ["N", 5, 32]}, {"y": ["N", 5, 32]})


def test_what_something_else_reads_too_stays() -> None:
    """Dividing it would need an additional operation in each call."""
    artifact = residual(50.0)
    smooth = smooth_quant(artifact, DATA)
    assert smooth.provenance[-1].facts["links"] == {}
    assert [node.op_type for node in onnx.load_model_from_string(smooth.data).graph.node].count("Mul") == 1
    assert weights(smooth).keys() == weights(artifact).keys()


def test_what_does_not_gain_stays() -> None:
    n = Network(4)
    x = n.op("LayerNormalization", "x", n.weight(np.ones(32, np.float32)), n.weight(np.zeros(32, np.float32)))
    n.op("MatMul", x, n.weight(np.eye(32, dtype=np.float32)), name="y")
    artifact = n.artifact({"x": ["N", 5, 32]}, {"y": ["N", 5, 32]})
    signs = np.random.default_rng(0).permuted(np.tile(np.float32([1, -1]), (64, 5, 16)), axis=-1)
    found = smooth_quant(artifact, make_dataset({"x": signs}, None))
    (link,) = found.provenance[-1].facts["links"].values()
    assert link["alpha"] is None
    assert link["scales"] == [1.0, 1.0]
    assert weights(found).keys() == weights(artifact).keys()


def test_convolutions_are_left_to_equalisation() -> None:
    data = make_dataset({"x": networks.images(4)}, None)
    found = smooth_quant(networks.cnn(), data)
    assert all(
        "conv" not in reader for link in found.provenance[-1].facts["links"].values() for reader in link["readers"]
    )


def test_the_same_arguments_give_the_same_bytes() -> None:
    uneven = outliers.attention(50.0)
    assert smooth_quant(uneven, DATA).digest == smooth_quant(uneven, DATA).digest
