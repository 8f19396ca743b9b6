"""The node that is blamed for a difference."""

import numpy as np
import onnx

from penstock.offline.convert.base import TensorLink
from penstock.offline.convert.parity.blame import of_failure, of_output
from penstock.offline.convert.parity.compare import OutputDifference
from penstock.offline.convert.parity.nodes import Nodes

MODEL = onnx.parser.parse_model(
    """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x, float[M] v) => (float[K] y, float[N] x2)
    { [first] a = Mul(x, x) [second] y = Add(a, v) [third] x2 = Neg(x) }"""
)
X = np.ones(2, np.float32)


def test_an_output_names_the_node_that_computes_it():
    found = of_output(Nodes(MODEL), "y", X, X + 1, OutputDifference(0.5))
    assert found.node == "second (Add)"
    assert found.error == 0.5
    assert found.expected.startswith("float32[2] from 1 to 1")
    assert found.found.startswith("float32[2] from 2 to 2")


def test_a_failure_names_the_node_that_fails():
    links = [TensorLink("y", "sum", "model.py:3")]
    found = of_failure(Nodes(MODEL), links, {"x": X, "v": np.ones(3, np.float32)}, "it fails")
    assert found.node == "second (Add)"
