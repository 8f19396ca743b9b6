"""Which changes of a weight a folded batch normalisation explains."""

import numpy as np
import onnx
import pytest

from penstock.offline.convert.folds import Folds

RNG = np.random.default_rng(0)
GIVEN = {
    "w": RNG.standard_normal((8, 3, 3, 3)),
    "b": RNG.standard_normal(8),
    "gamma": RNG.uniform(0.5, 2, 8),
    "beta": RNG.standard_normal(8),
    "mean": RNG.standard_normal(8),
    "variance": RNG.uniform(0.5, 2, 8),
}
FACTORS = GIVEN["gamma"] / np.sqrt(GIVEN["variance"] + 1e-5)
WEIGHT = GIVEN["w"] * FACTORS[:, None, None, None]
BIAS = GIVEN["beta"] + (GIVEN["b"] - GIVEN["mean"]) * FACTORS


def folds(operator: str = "Conv") -> Folds:
    graph = onnx.GraphProto(node=[onnx.helper.make_node(operator, ["x", "w", "b"], ["y"])])
    return Folds(graph, {"w": WEIGHT, "b": BIAS}, GIVEN)


def test_a_folded_weight_and_its_bias_are_explained() -> None:
    assert folds().explain("w", WEIGHT, GIVEN["w"])
    assert folds().explain("b", BIAS, GIVEN["b"])


@pytest.mark.parametrize("factor", [0, -1, 1.01])
def test_another_factor_of_one_channel_is_not(factor: float) -> None:
    wrong, bias = WEIGHT.copy(), BIAS.copy()
    wrong[3] *= factor
    bias[3] += 0.1
    assert not folds().explain("w", wrong, GIVEN["w"])
    assert not folds().explain("b", bias, GIVEN["b"])


def test_tables_are_never_folded() -> None:
    assert not folds("Gather").explain("w", WEIGHT, GIVEN["w"])
