"""Links by names and shapes, with the layouts of tf2onnx."""

import numpy as np
import onnx

from penstock.offline.convert.tensorflow.links import layer_of, links, relaid, unlinked

MODEL = onnx.parser.parse_model(
    """<ir_version: 10, opset_import: ["" : 18]> g (float[N, 3, 8, 6] x) => (float[N, 3, 8, 6] out)
    { conv = Abs(x) Relu__7 = Relu(conv) s = Sub(Relu__7, x) q = Mul(s, s) out = Neg(q) }"""
)
SHAPES = {"conv": [None, 8, 6, 3], "s": [None, 3, 8, 6], "q": [None, 3, 8, 6], "out_of_tensorflow": [None, 3, 8, 6]}


def test_moved_channels_are_a_part_of_the_link():
    found = {link.tensor: link.source for link in links(MODEL, SHAPES, {"out_of_tensorflow": "out"})}
    assert found == {"conv": "conv@0,3,1,2", "q": "q", "out": "out_of_tensorflow"}


def test_a_square_of_a_difference_is_linked_only_as_a_whole():
    assert "s" not in {link.tensor for link in links(MODEL, SHAPES, {})}


def test_unclear_layouts_have_no_link():
    unclear = SHAPES | {"conv": [None, None, None, None], "q": [None, 3, 8]}
    assert [link.tensor for link in links(MODEL, unclear, {})] == []


def test_values_are_transposed_as_the_link_states():
    value = np.zeros((2, 8, 6, 3))
    assert unlinked("conv:0@0,3,1,2") == ("conv:0", (0, 3, 1, 2))
    assert relaid(value, "conv:0@0,3,1,2").shape == (2, 3, 8, 6)
    assert relaid(value, "conv:0") is value


def test_calls_are_no_part_of_a_layers_name():
    assert layer_of("StatefulPartitionedCall/model/dense/MatMul") == "model/dense/MatMul"
    assert layer_of("PartitionedCall") == "PartitionedCall"
