from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.zoo.caffe import MODELS, Network
from caffe_networks import compare, image
from converted import differences, export, inputs_of
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.frameworks.caffe import CONVERTER


def test_no_box_gives_rows_of_minus_one(tmp_path: Path) -> None:
    path = MODELS["ssd"].make(tmp_path)
    assert isinstance(path, Path)
    path.write_text(path.read_text().replace("confidence_threshold: 0.4", "confidence_threshold: 2"))
    source = CONVERTER.open(path, ConvertOptions())
    exported = export(source, tmp_path / "model.onnx")
    inputs = inputs_of(source, 2)
    np.testing.assert_array_equal(source.forward(inputs)["detection_out"], np.full((1, 1, 2, 7), -1))
    assert not differences(source, exported, tmp_path / "model.onnx", inputs)


def test_prior_boxes_by_their_formula(tmp_path: Path) -> None:
    net = image(1, 1, 8, 8)
    net.add("pool", "Pooling", "data", "pooling_param { kernel_size: 4 stride: 4 }")
    net.add(
        "y",
        "PriorBox",
        "pool data",
        "prior_box_param { min_size: 2 max_size: 8 aspect_ratio: 4 variance: [1, 2, 3, 4] }",
    )
    net.weights["x"] = [net.random(1)]
    boxes, variances = compare(net, tmp_path, np.zeros((1, 1, 8, 8)))["y"].reshape(2, 2, 2, 4, 4)
    center = np.array([6, 2, 6, 2])  # of the pixel in the first row and the second column: x, y
    halves = [[1, 1], [2, 2], [2, 0.5], [0.5, 2]]  # min, the root of min times max, ratio 4, ratio 1/4
    expected = [np.add(center, [-w, -h, w, h]) / 8 for w, h in halves]
    np.testing.assert_allclose(boxes[0, 1], expected, rtol=1e-6)
    np.testing.assert_array_equal(variances[1, 1, 0], [1, 2, 3, 4])


def test_the_best_boxes_of_each_image_are_kept(tmp_path: Path) -> None:
    """Two classes, three priors, of which the first two overlap."""
    net = Network(
        'input: "data" input_shape { dim: 2 dim: 12 } input: "scores" input_shape { dim: 2 dim: 9 }'
        ' input: "priors" input_shape { dim: 1 dim: 2 dim: 12 }'
    )
    text = "num_classes: 3 keep_top_k: 2 confidence_threshold: 0.1 nms_param { nms_threshold: 0.4 }"
    net.add("y", "DetectionOutput", "data scores priors", f"detection_output_param {{ {text} }}")
    net.weights["x"] = [net.random(1)]
    path = net.write(tmp_path, "net")
    source = CONVERTER.open(path, ConvertOptions(dynamic={"data": {0: "N"}, "scores": {0: "N"}, "priors": {}}))
    priors = [[0, 0, 0.4, 0.4], [0, 0, 0.4, 0.5], [0.5, 0.5, 1, 1]]
    inputs = {
        "data": np.zeros((2, 12), np.float32),
        "scores": np.array([[0, 0.9, 0.3, 0, 0.8, 0.2, 0, 0.7, 0.6], [1, 0.05, 0, 1, 0.15, 0, 1, 0, 0]], np.float32),
        "priors": np.array([np.ravel(priors), np.ones(12)], np.float32)[None],
    }
    rows = source.forward(inputs)["y"][0, 0]
    np.testing.assert_allclose(
        rows, [[0, 1, 0.9, *priors[0]], [0, 1, 0.7, *priors[2]], [1, 1, 0.15, *priors[1]]], rtol=1e-6
    )
    exported = export(source, tmp_path / "model.onnx")
    assert not differences(source, exported, tmp_path / "model.onnx", inputs)
