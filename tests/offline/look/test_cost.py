from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

import input_models
import models
from penstock.artifact import Artifact
from penstock.offline.look.cost import cost
from row_graphs import parsed


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_a_product(rows: int, columns: int, batch: int) -> None:
    found = cost(models.linear(rows, columns), {"x": (batch, rows)})
    assert found.multiply_adds == batch * rows * columns
    assert found.activation_bytes == 4 * batch * (rows + columns)
    assert (found.linear, found.quantisable, found.share_of_weights, found.share_of_work) == (1, 1, 1.0, 1.0)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 3]), st.integers(3, 40), st.integers(3, 40))
def test_a_convolution_at_any_size(channels: int, height: int, width: int) -> None:
    found = cost(input_models.image_net(channels), {"x": (1, channels, height, width)})
    pixels = (height - 2) * (width - 2)
    assert found.multiply_adds == pixels * 8 * channels * 9 + 8 * 5
    # The result of the convolution and that of the ReLU exist at the same time.
    image = channels * height * width
    assert found.activation_bytes == 4 * max(image + 8 * pixels, 2 * 8 * pixels, 8 * pixels + 8)


def test_operators_that_stay_float_are_not_counted() -> None:
    found = cost(parsed("y = MatMul(x, z)", "float[N, 4] x, float[4, 4] z"), {"x": (2, 4), "z": (4, 4)})
    assert (found.linear, found.quantisable, found.multiply_adds) == (1, 0, 32)
    assert "no operator to quantise" in found.obstacle


def test_a_recurrent_operator_works_at_every_step() -> None:
    node = helper.make_node("GRU", ["x", "w", "r"], ["all", "y"], hidden_size=5)
    artifact = input_models.built(
        [node],
        [("x", 1, ["T", "N", 3])],
        [("y", 1, [1, "N", 5])],
        {"w": input_models.weight(1, 15, 3), "r": input_models.weight(1, 15, 5)},
    )
    assert cost(artifact, {"x": (7, 2, 3)}).multiply_adds == 7 * 2 * 15 * (3 + 5)


def test_a_model_that_is_quantised_already() -> None:
    found = cost(models.product_of_bytes(3), {"x": (1, 64)})
    assert found.obstacle == ""
    assert found.quantisable == 1
    assert found.multiply_adds == 64 * 16


def test_without_shapes_and_without_weights(tmp_path: Path) -> None:
    found = cost(models.linear(), {})
    assert (found.activation_bytes, found.multiply_adds, found.share_of_work) == (None, None, None)
    path = models.external_linear(tmp_path)
    (tmp_path / "w.bin").unlink()
    found = cost(Artifact.from_file(path), {"x": (1, 3)})
    assert "w.bin" in found.obstacle
    assert found.multiply_adds == 6


@pytest.mark.parametrize("artifact", [models.unknown_operator(), models.count_to(), input_models.categories()])
def test_unusual_models_have_a_cost_or_none(artifact: Artifact) -> None:
    assert cost(artifact, {}).obstacle
