from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from caffe_networks import compare, image

VALUES = np.array([[-2.0, -0.5, 0.0, 0.5, 2.0, 80.0]])


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("ReLU", "relu_param { negative_slope: 0.5 }", [-1, -0.25, 0, 0.5, 2, 80]),
        ("ReLU6", "", [0, 0, 0, 0.5, 2, 6]),
        ("AbsVal", "", [2, 0.5, 0, 0.5, 2, 80]),
        ("Power", "power_param { power: 2 scale: 3 shift: 1 }", [25, 0.25, 1, 6.25, 49, 58081]),
        ("Exp", "exp_param { base: 2 scale: 0.5 shift: 1 }", [1, 2**0.75, 2, 2**1.25, 4, 2.0**41]),
        ("Log", "log_param { base: 10 shift: 3 }", np.log10([1, 2.5, 3, 3.5, 5, 83])),
        ("BNLL", "", np.log1p(np.exp([-2, -0.5, 0, 0.5, 2, 80]))),
        ("Threshold", "threshold_param { threshold: 0.5 }", [0, 0, 0, 0, 1, 1]),
        ("Clip", "clip_param { min: -1 max: 1 }", [-1, -0.5, 0, 0.5, 1, 1]),
        ("ELU", "elu_param { alpha: 2 }", [2 * np.expm1(-2), 2 * np.expm1(-0.5), 0, 0.5, 2, 80]),
        ("Sigmoid", "", 1 / (1 + np.exp(-VALUES[0]))),
        ("TanH", "", np.tanh(VALUES[0])),
        ("Swish", "swish_param { beta: 2 }", VALUES[0] / (1 + np.exp(-2 * VALUES[0]))),
        ("Dropout", "dropout_param { dropout_ratio: 0.9 }", VALUES[0]),
    ],
)
def test_functions_of_one_value(kind: str, text: str, expected: list[float], tmp_path: Path) -> None:
    net = image(1, 6)
    net.add("y", kind, "data", text)
    net.weights["x"] = [net.random(1)]
    np.testing.assert_allclose(compare(net, tmp_path, VALUES)["y"][0], expected, rtol=2e-6, atol=1e-7)


def test_a_weighted_sum(tmp_path: Path) -> None:
    net = image(1, 6)
    net.add("abs", "AbsVal", "data")
    net.add("y", "Eltwise", "data abs", "eltwise_param { coeff: 2 coeff: -1 }")
    net.weights["x"] = [net.random(1)]
    np.testing.assert_allclose(compare(net, tmp_path, VALUES)["y"], 2 * VALUES - np.abs(VALUES))


def test_prelu_with_one_slope(tmp_path: Path) -> None:
    net = image(1, 6)
    net.add("y", "PReLU", "data", "prelu_param { channel_shared: true }", blobs=[np.array([0.25], np.float32)])
    np.testing.assert_allclose(compare(net, tmp_path, VALUES)["y"][0], [-0.5, -0.125, 0, 0.5, 2, 80])
