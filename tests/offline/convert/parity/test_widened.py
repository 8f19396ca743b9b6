"""Nodes in double precision."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.offline.convert.parity.widened import widen_array, widened


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_floats_become_double(dtype):
    assert widen_array(np.ones(2, dtype)).dtype == np.float64
    assert widen_array(np.ones(2, np.int32)).dtype == np.int32


def test_a_cast_to_float32_widens_and_a_cast_to_float16_rounds():
    kinds = [
        widened(helper.make_node("Cast", ["x"], ["y"], to=to)).attribute[0].i
        for to in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64)
    ]
    assert kinds == [TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT64]


@pytest.mark.parametrize("value", [{"value_float": 0.5}, {"value_floats": [0.5, 2.0]}])
def test_constants_become_tensors_of_double(value):
    (attribute,) = widened(helper.make_node("Constant", [], ["y"], **value)).attribute
    assert numpy_helper.to_array(attribute.t).dtype == np.float64
    assert numpy_helper.to_array(attribute.t).tolist() == next(iter(value.values()))


def test_the_graphs_of_a_node_are_widened_and_the_node_itself_is_unchanged():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (bool c, float[2] x) => (float[2] y) {
            y = If (c) <
                then_branch = a () => (float[2] p) { p = Cast<to = 10>(x) },
                else_branch = b () => (float[2] q) <float[2] w = {1, 2}> { q = Add(x, w) }
            >
        }"""
    )
    (node,) = model.graph.node
    before = node.SerializeToString()
    made = {attribute.name: attribute.g for attribute in widened(node).attribute}
    assert made["then_branch"].node[0].attribute[0].i == TensorProto.DOUBLE
    assert made["else_branch"].initializer[0].data_type == TensorProto.DOUBLE
    assert made["else_branch"].output[0].type.tensor_type.elem_type == TensorProto.DOUBLE
    assert node.SerializeToString() == before
