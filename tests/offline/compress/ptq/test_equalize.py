"""Cross-layer equalisation, compared with plain loops, and its purpose: INT8 of channels with uneven ranges."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import networks
import outliers
from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.errors import InvalidData, Unsupported
from penstock.offline.compress.ptq.equalize import equalize, factors


def weights(artifact: Artifact) -> dict[str, np.ndarray]:
    graph = onnx.load_model_from_string(artifact.data).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def chain(sizes: list[int]) -> Artifact:
    """x (N, sizes[0]) to y: Gemms with ReLU between them, of widely different channels."""
    n, rng = Network(), np.random.default_rng(5)
    x = "x"
    for at, (width, outputs) in enumerate(itertools.pairwise(sizes)):
        array = rng.normal(0, 1, (width, outputs)) * np.exp(rng.normal(0, 2, outputs))
        x = n.op(
            "Gemm", x, n.weight(array.astype(np.float32)), n.normal(outputs), name="y" if at == len(sizes) - 2 else ""
        )
        x = n.op("Relu", x) if at < len(sizes) - 2 else x
    return n.artifact({"x": ["N", sizes[0]]}, {"y": ["N", sizes[-1]]})


def test_a_pair_is_the_papers_formula() -> None:
    artifact = chain([6, 9, 4])
    first, second = weights(artifact)["w0"].astype(float), weights(artifact)["w2"].astype(float)
    found = weights(equalize(artifact, exact=False))
    for i in range(9):
        r1, r2 = max(abs(first[:, i])), max(abs(second[i, :]))
        s = r1 / (r1 * r2) ** 0.5  # §4.1, equation 11
        np.testing.assert_allclose(found["w0"][:, i], first[:, i] / s, rtol=1e-6)
        np.testing.assert_allclose(found["w2"][i, :], second[i, :] * s, rtol=1e-6)
        np.testing.assert_allclose(found["w1"][i], weights(artifact)["w1"][i] / s, rtol=1e-6)


def test_a_chain_settles_where_the_loop_does() -> None:
    artifact = chain([6, 9, 8, 7, 4])
    arrays = [weights(artifact)[name].astype(float) for name in ("w0", "w2", "w4", "w6")]
    for _ in range(200):
        for one, two in itertools.pairwise(arrays):
            for i in range(one.shape[1]):
                s = (max(abs(one[:, i])) / max(abs(two[i, :]))) ** 0.5
                one[:, i] /= s
                two[i, :] *= s
    found = weights(equalize(artifact, exact=False))
    for name, array in zip(("w0", "w2", "w4", "w6"), arrays, strict=True):
        np.testing.assert_allclose(found[name], array, rtol=2e-2)  # sweeps end when none moves by a thousandth


def test_pointwise_depthwise_pointwise_is_the_formula_for_three() -> None:
    n = Network(2)
    x = n.op("Relu", n.op("Conv", "x", n.normal(8, 4, 1, 1)))
    x = n.op("Relu", n.op("Conv", x, n.normal(8, 1, 3, 3), group=8))
    n.op("Conv", x, n.normal(3, 8, 1, 1), name="y")
    artifact = n.artifact({"x": ["N", 4, 6, 6]}, {"y": ["N", 3, 4, 4]})
    one, two, three = (weights(artifact)[name] for name in ("w0", "w1", "w2"))
    r = np.array([np.abs(one).max((1, 2, 3)), np.abs(two).max((1, 2, 3)), np.abs(three).max((0, 2, 3))])
    even = np.prod(r, axis=0) ** (1 / 3)  # all three ranges of a channel become their geometric mean
    found = weights(equalize(artifact, exact=False))
    np.testing.assert_allclose(np.abs(found["w0"]).max((1, 2, 3)), even, rtol=5e-3)
    np.testing.assert_allclose(np.abs(found["w1"]).max((1, 2, 3)), even, rtol=5e-3)
    np.testing.assert_allclose(np.abs(found["w2"]).max((0, 2, 3)), even, rtol=5e-3)


@pytest.mark.parametrize("with_data", [True, False], ids=["activations", "weights"])
def test_int8_of_uneven_channels_is_rescued(with_data: bool) -> None:
    even, uneven = outliers.depthwise(), outliers.depthwise(50.0)
    calibrate, evaluate = outliers.images(64), outliers.images(64, seed=1)
    equalised = equalize(uneven, calibrate if with_data else None)
    assert equalised.provenance[-1].facts["max_relative_error"] == 0.0
    assert np.array_equal(outliers.run(uneven, evaluate, "disabled"), outliers.run(equalised, evaluate, "disabled"))
    before, after, best = (
        outliers.error(outliers.int8(artifact, calibrate), even, evaluate) for artifact in (uneven, equalised, even)
    )
    assert before > 5 * after
    assert after < 2 * best


def test_inexact_scales_are_the_same_function_to_rounding() -> None:
    facts = equalize(outliers.depthwise(50.0), outliers.images(16), exact=False).provenance[-1].facts
    assert 0 < facts["max_relative_error"] < 1e-5


def test_facts_tell_how_uneven_it_was() -> None:
    facts = equalize(outliers.depthwise(50.0), outliers.images(64)).provenance[-1].facts
    # The last tensor was even from the start.
    assert all(before > 10 and after < 2 for before, after in [link["spread"] for link in facts["links"].values()][:-1])
    assert len(facts["links"]) == 5


def test_a_clip_that_nothing_reaches_becomes_a_relu() -> None:
    artifact, data = outliers.depthwise(activation="Clip"), outliers.images(32)
    found = equalize(artifact, data)
    facts = found.provenance[-1].facts
    kept, replaced = facts["clips_kept"], facts["clips_replaced"]
    operators = [node.op_type for node in onnx.load_model_from_string(found.data).graph.node]
    assert operators.count("Clip") == len(kept)
    assert operators.count("Relu") == len(replaced) > 0
    assert np.array_equal(outliers.run(artifact, data, "disabled"), outliers.run(found, data, "disabled"))


def test_a_clip_that_is_reached_stays() -> None:
    artifact = outliers.depthwise(activation="Clip")
    data = make_dataset({"x": 50 * outliers.images(32).inputs["x"]}, None)
    facts = equalize(artifact, data).provenance[-1].facts
    assert all(share > 0 for share in facts["clips_kept"].values())
    assert all(share == 0 for share in facts["clips_replaced"].values())
    assert len(facts["clips_kept"]) == 4
    assert not equalize(artifact).provenance[-1].facts["links"], "without data nobody knows"


def test_dead_channels_stay_as_they_are() -> None:
    first, second = np.array([4.0, 0.0, 1.0, 1e-30]), np.array([1.0, 1.0, 0.0, 1.0])
    assert factors(first, second, 0.5).tolist() == [2.0, 1.0, 1.0, pytest.approx(2e-3)]
    assert factors(np.zeros(2), np.ones(2), 0.5).tolist() == [1.0, 1.0]


def test_scales_keep_to_their_limit() -> None:
    scales = [link["scales"] for link in equalize(outliers.depthwise(1e9)).provenance[-1].facts["links"].values()]
    assert max(largest for _, largest in scales) == 2**13  # the power of two next to the limit of 10,000
    assert min(smallest for smallest, _ in scales) >= 2**-13


def test_the_same_arguments_give_the_same_bytes() -> None:
    artifact, data = outliers.depthwise(50.0), outliers.images(40)
    assert equalize(artifact, data).digest == equalize(artifact, data).digest


def test_nothing_to_equalise_changes_nothing() -> None:
    found = equalize(networks.attention())
    assert found.provenance[-1].facts["links"] == {}


def test_a_fixed_batch_is_fine() -> None:
    found = equalize(networks.cnn(batch=4), make_dataset({"x": networks.images(8)}, None))
    assert found.provenance[-1].facts["max_relative_error"] == 0.0


def test_batch_normalization_is_to_be_folded_first() -> None:
    n = Network()
    statistics = [n.weight(np.ones(8, np.float32)) for _ in range(4)]
    n.op("Relu", n.op("BatchNormalization", n.conv("x", 3, 8), *statistics), name="y")
    with pytest.raises(Unsupported, match="fold"):
        equalize(n.artifact({"x": ["N", 3, 6, 6]}, {"y": ["N", 8, 6, 6]}))


def test_data_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidData):
        equalize(outliers.depthwise(), make_dataset({"z": networks.images(2)}, None))
