"""One tensor of the source against one of the ONNX model."""

import numpy as np
import onnx
import pytest

from penstock.offline.convert.parity.compare import compare, statistics
from penstock.offline.convert.parity.nodes import Nodes
from penstock.offline.convert.parity.tolerance import RoundingModel

X = np.array([[1.0, 2.0, 4.0]], np.float32)


@pytest.fixture
def rounding():
    """Rounding of ``y``, which is ``x`` itself, and ``k``, the place of its largest value."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N,3] x) => (float[N,3] y, int64[N] k) '
        "{ y = Identity(x) k = ArgMax<axis = 1, keepdims = 0>(x) }"
    )
    return RoundingModel(Nodes(model), {"x": X}, ["y", "k"])


def test_equal_values_need_no_explanation(rounding):
    assert compare("y", X, X, rounding).reason == ""
    assert compare("y", np.nextafter(X, np.float32(9)), X, rounding).reason == ""


def test_a_difference_is_relative_to_the_largest_value(rounding):
    found = compare("y", X - np.array([[0.0, 0.4, 0.0]], np.float32), X, rounding)
    assert found.reason
    assert found.error == pytest.approx(0.1)
    assert found.tolerance < 1e-3


@pytest.mark.parametrize(
    ("want", "reason"),
    [
        (X.astype(np.int64), "is float32, but int64"),
        (X[:, :2], r"has shape [1, 3], but [1, 2]"),
        (np.where(X == 2, np.nan, X).astype(np.float32), "NaN"),
    ],
)
def test_types_shapes_and_special_values_must_agree(want, reason, rounding):
    found = compare("y", want, X, rounding)
    assert reason.lower() in found.reason.lower()
    assert found.error == np.inf


def test_whole_numbers_are_equal_or_not(rounding):
    assert compare("k", np.array([2]), np.array([2]), rounding).reason == ""
    assert compare("k", np.array([1]), np.array([2]), rounding).reason


def test_statistics_tell_of_values_that_are_not_finite():
    assert statistics(X) == "float32[1, 3] from 1 to 4, mean 2.33333"
    assert "1 not finite" in statistics(np.array([1.0, np.inf]))
