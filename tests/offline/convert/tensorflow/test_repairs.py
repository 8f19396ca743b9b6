"""Corrections of the graphs that tf2onnx writes."""

import numpy as np
import onnx
from onnx import numpy_helper

from penstock.offline.convert.tensorflow.functions import DOMAIN
from penstock.offline.convert.tensorflow.repairs import quantise_rows, raise_opset, repair


def model(text: str, head: str = "float[N, 4] x") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g ({head}) => (float[N, 4] y) {text}')


def test_what_nothing_reads_is_removed():
    found = model("<float unread = {1}, float w = {2}> { dead = Neg(x) y = Mul(x, w) }")
    repair(found.graph)
    assert [node.op_type for node in found.graph.node] == ["Mul"]
    assert [one.name for one in found.graph.initializer] == ["w"]


def test_biases_of_64_bits_become_floats():
    found = model("<float s = {0.5}> { b = DequantizeLinear(wide, s) y = Add(x, b) }")
    found.graph.initializer.append(numpy_helper.from_array(np.array([1, 2, 3, 1 << 40], np.int64), "wide"))
    repair(found.graph)
    assert [node.op_type for node in found.graph.node] == ["Add"]
    (bias,) = (numpy_helper.to_array(one) for one in found.graph.initializer)
    assert bias.tolist() == [0.5, 1.0, 1.5, float(1 << 39)]


def test_activations_are_quantised_row_by_row_and_biases_not():
    found = model(
        """<float[4] bias = {1, 2, 3, 4}> {
            q, s, z = DynamicQuantizeLinear(x)
            rows = DequantizeLinear(q, s, z)
            q2, s2, z2 = DynamicQuantizeLinear(bias)
            b = DequantizeLinear(q2, s2, z2)
            y = Add(rows, b)
        }"""
    )
    quantise_rows(found.graph)
    assert [(node.op_type, node.domain) for node in found.graph.node] == [
        ("QuantisedRows", DOMAIN),
        ("Identity", ""),
        ("Add", ""),
    ]


def test_the_opset_is_raised_if_all_operators_keep_their_meaning():
    plain, grouped = model("{ y = Neg(x) }"), model("{ y = GroupNormalization <num_groups = 1> (x, x, x) }")
    raise_opset(plain, 21)
    raise_opset(grouped, 21)
    assert [one.opset_import[0].version for one in (plain, grouped)] == [21, 18]
    assert plain.ir_version >= 10
