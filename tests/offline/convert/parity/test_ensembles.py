"""Ensembles of trees in double precision."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from penstock.offline.convert.parity.ensembles import ensemble_of
from penstock.offline.convert.parity.nodes import Nodes
from penstock.offline.convert.parity.tolerance import RoundingModel
from penstock.offline.convert.tables.forest import Forest, GraphWriter, Tree
from penstock.tensor import DataType


def stump(yes: list[float], no: list[float], target: int = 0) -> Tree:
    values = np.array([np.zeros(len(yes)), yes, no])
    children = np.array([1, -1, -1]), np.array([2, -1, -1])
    return Tree(np.array([0, -1, -1]), np.zeros(3), *children, np.zeros(3, bool), values, target)


def model(trees: list[Tree], base: list[float], datatype: DataType = DataType.FP32) -> onnx.ModelProto:
    writer = GraphWriter()
    writer.rename(Forest(trees, "<=", np.array(base), 1).write(writer, "x", datatype), "y")
    given = helper.make_tensor_value_info("x", datatype.onnx, ["N", 1])
    output = helper.make_tensor_value_info("y", 1, ["N", len(base)])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(
        helper.make_graph(writer.nodes, "g", [given], [output]), opset_imports=opsets, ir_version=10
    )


@pytest.mark.parametrize("datatype", [DataType.FP32, DataType.FP64])
def test_sums_are_those_of_the_leaves(datatype: DataType) -> None:
    trees = [stump([1.0, 2.0], [3.0, 4.0]), stump([1e9], [0.0], target=1), stump([-1e9], [0.5], target=1)]
    x = np.array([[-1.0], [1.0]], datatype.dtype)
    found = Nodes(model(trees, [0.25, 0.5], datatype)).run({"x": x}, ["y"], precise=True)["y"]
    np.testing.assert_array_equal(found, [[1.25, 2.5], [3.25, 5.0]])


def test_the_error_of_a_sum_grows_with_its_terms_even_if_they_cancel() -> None:
    x = {"x": np.array([[-1.0]], np.float32)}
    few, many, cancelled = (
        RoundingModel(Nodes(model(trees, [0.0])), x, ["y"])
        for trees in (
            [stump([1.0], [0.0])],
            [stump([1.0], [0.0])] * 100,
            [stump([1e4], [0.0]), stump([-1e4], [0.0])] * 50,
        )
    )
    errors = [
        max(float(np.abs(one - rounding.exact("y")).max()) for one in rounding.noisy("y"))
        for rounding in (few, many, cancelled)
    ]
    assert 0 < errors[0] < 1e-6
    assert 1e-5 < errors[1] < 1e-4
    assert 0.05 < errors[2] < 2.0


def test_other_ensembles_are_left_to_their_kernels() -> None:
    for name, value in (("aggregate_function", "MAX"), ("post_transform", "SOFTMAX")):
        assert ensemble_of(helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], **{name: value})) is None
    assert ensemble_of(helper.make_node("Abs", ["x"], ["y"])) is None
