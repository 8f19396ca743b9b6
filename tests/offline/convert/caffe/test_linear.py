from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.zoo.caffe import MODELS
from caffe_networks import compare, image
from penstock.errors import InvalidInput
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.frameworks.caffe import CONVERTER


def test_batch_norm_divides_its_statistics_by_their_factor(tmp_path: Path) -> None:
    net = image(1, 2)
    blobs = [np.array(values, np.float32) for values in ([2, 4], [8, 18], [2])]
    net.add("y", "BatchNorm", "data", "batch_norm_param { eps: 0 }", blobs=blobs)
    np.testing.assert_allclose(compare(net, tmp_path, [[3, 8]])["y"], [[(3 - 1) / 2, (8 - 2) / 3]], rtol=1e-6)


def test_scale_and_bias_along_several_axes(tmp_path: Path) -> None:
    net = image(2, 2, 3)
    factors = np.arange(6, dtype=np.float32).reshape(2, 3)
    net.add(
        "scaled", "Scale", "data", "scale_param { axis: 1 num_axes: -1 bias_term: true }", blobs=[factors, factors + 1]
    )
    net.add("y", "Bias", "scaled", "bias_param { axis: -1 }", blobs=[np.array([1, 2, 3], np.float32)])
    array = np.random.default_rng(0).normal(size=(2, 2, 3))
    np.testing.assert_allclose(compare(net, tmp_path, array)["y"], array * factors + factors + 1 + [1, 2, 3], rtol=1e-5)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_inner_product_with_either_order_of_weights(is_transposed: bool, tmp_path: Path) -> None:
    net = image(1, 2, 3)
    weights = np.arange(12, dtype=np.float32).reshape(2, 6)
    text = f"inner_product_param {{ num_output: 2 bias_term: false transpose: {str(is_transposed).lower()} }}"
    net.add("y", "InnerProduct", "data", text, blobs=[weights.T if is_transposed else weights])
    array = np.arange(6).reshape(1, 2, 3)
    np.testing.assert_allclose(compare(net, tmp_path, array)["y"][0], weights @ np.arange(6))


def test_softmax_of_large_values(tmp_path: Path) -> None:
    net = image(1, 3)
    net.add("y", "Softmax", "data")
    net.weights["x"] = [net.random(1)]
    np.testing.assert_allclose(compare(net, tmp_path, [[1000, 1000, -1000]])["y"], [[0.5, 0.5, 0]])


def test_an_index_outside_of_the_table(tmp_path: Path) -> None:
    source = CONVERTER.open(MODELS["embedding"].make(tmp_path), ConvertOptions())
    with pytest.raises(InvalidInput, match="an index is outside of the 20 rows"):
        source.forward({"ids": np.full((1, 7), 20, np.float32)})
