"""Nodes in double precision."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.offline.convert.parity.widened import widen_array, widened


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floats_become_double(kind: type) -> None:
    assert widen_array(np.ones(2, kind)).dtype == np.float64


def test_other_arrays_stay() -> None:
    for array in (np.ones(2, np.float64), np.arange(3), np.array([True])):
        assert widen_array(array) is array


def test_a_cast_to_float_becomes_a_cast_to_double() -> None:
    node = widened(helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT))
    assert node.attribute[0].i == TensorProto.DOUBLE


def test_a_cast_to_half_still_rounds() -> None:
    node = widened(helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16))
    assert node.attribute[0].i == TensorProto.FLOAT16


def test_the_original_is_unchanged() -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    widened(node)
    assert node.attribute[0].i == TensorProto.FLOAT


def test_constants_become_double() -> None:
    for attributes in (
        {"value": numpy_helper.from_array(np.ones(2, np.float32))},
        {"value_float": 1.0},
        {"value_floats": [1.0, 1.0]},
    ):
        (attribute,) = widened(helper.make_node("Constant", [], ["y"], **attributes)).attribute
        assert attribute.t.data_type == TensorProto.DOUBLE
        assert (numpy_helper.to_array(attribute.t) == 1).all()


def test_branches_become_double() -> None:
    inner = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["u"], to=TensorProto.FLOAT)],
        "then",
        [],
        [helper.make_tensor_value_info("u", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(np.ones(2, np.float32), "w")],
    )
    node = widened(helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner))
    for attribute in node.attribute:
        assert attribute.g.node[0].attribute[0].i == TensorProto.DOUBLE
        assert attribute.g.output[0].type.tensor_type.elem_type == TensorProto.DOUBLE
        assert attribute.g.initializer[0].data_type == TensorProto.DOUBLE
