from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from caffe_networks import compare, image, opened
from penstock.errors import InvalidModel

ARRAY = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("Reshape", "reshape_param { shape { dim: 0 dim: 2 dim: -1 } }", ARRAY.reshape(2, 2, 6)),
        ("Reshape", "reshape_param { shape { dim: 6 dim: 2 } axis: 1 }", ARRAY.reshape(2, 6, 2)),
        ("Reshape", "reshape_param { shape { dim: 1 } axis: -1 num_axes: 0 }", ARRAY.reshape(2, 3, 4, 1)),
        ("Flatten", "", ARRAY.reshape(2, 12)),
        ("Flatten", "flatten_param { axis: 1 end_axis: 1 }", ARRAY),
        ("Permute", "permute_param { order: 0 order: 2 }", ARRAY.transpose(0, 2, 1)),
        ("Tile", "tile_param { axis: 2 tiles: 2 }", np.concatenate([ARRAY, ARRAY], 2)),
        ("Reduction", "reduction_param { operation: SUMSQ axis: 1 coeff: 2 }", 2 * (ARRAY**2).sum((1, 2))),
        ("Reduction", "reduction_param { operation: MEAN axis: -1 }", ARRAY.mean(-1)),
        ("Split", "", ARRAY),
    ],
)
def test_one_input(kind: str, text: str, expected: np.ndarray, tmp_path: Path) -> None:
    net = image(2, 3, 4)
    net.add("y", kind, "data", text)
    net.weights["x"] = [net.random(1)]
    np.testing.assert_array_equal(compare(net, tmp_path, ARRAY)["y"], expected)


def test_arg_max_returns_the_last_of_equal_values(tmp_path: Path) -> None:
    net = image(1, 4)
    net.add("along", "ArgMax", "data", "argmax_param { axis: 1 }")
    net.add("best", "ArgMax", "data", "argmax_param { out_max_val: true }")
    net.add("largest", "ArgMax", "data", "argmax_param { axis: -1 out_max_val: true }")
    net.weights["x"] = [net.random(1)]
    found = compare(net, tmp_path, [[1, 7, 7, 2]])
    assert found["along"].tolist() == [[2]]
    assert found["best"].tolist() == [[[2], [7]]]
    assert found["largest"].tolist() == [[7]]


def test_slices_and_crops(tmp_path: Path) -> None:
    net = image(2, 3, 4)
    net.add("cut", "Slice", "data", "slice_param { axis: -1 slice_point: 1 }", "first rest")
    net.add("y", "Crop", "data rest", "crop_param { axis: 1 offset: 0 offset: 1 }")
    net.weights["x"] = [net.random(1)]
    found = compare(net, tmp_path, ARRAY)
    np.testing.assert_array_equal(found["first"], ARRAY[..., :1])
    np.testing.assert_array_equal(found["y"], ARRAY[..., 1:])


def test_a_crop_that_does_not_fit(tmp_path: Path) -> None:
    net = image(2, 3, 4)
    net.add("y", "Crop", "data data", "crop_param { offset: 1 }")
    net.weights["x"] = [net.random(1)]
    with pytest.raises(InvalidModel, match="does not fit into"):
        opened(net, tmp_path)
