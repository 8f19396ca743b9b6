"""Inputs in which NaN stands for a missing value."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from penstock.artifact import Artifact, Format
from penstock.engines.registry import get_engine
from penstock.inputs.missing import takes_missing
from penstock.tensor import Array

_HEAD = '<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]> g (float[N, 2] x) => (float[N, C] y)'
_IMPUTER = "ai.onnx.ml.Imputer <imputed_value_floats = [1.0, 2.0], replaced_value_float = {}>"
_TAKING = (
    "{ n = IsNaN(x) z = Constant<value_float = 3.0>() y = Where(n, z, x) }",
    "{ n = IsNaN(x) z = Constant<value_float = 3.0>() f = Floor(x) m = IsNaN(f) y = Where(m, z, f) }",
    "{ t = Transpose(x) n = IsNaN(t) z = Constant<value_float = 3.0>() w = Where(n, z, t) y = Transpose(w) }",
    (
        "{ n = IsNaN(x) f = Cast<to = 1>(n) z = Constant<value_float = 3.0>() g = Greater(x, z) h = Cast<to = 1>(g)"
        " y = Add(f, h) }"
    ),
)
_COMPUTING = (
    "{ z = Constant<value_float = 3.0>() y = Add(x, z) }",
    "{ y = Identity(x) }",
    "{ z = Constant<value_float = 3.0>() g = Greater(x, z) y = Cast<to = 1>(g) }",
    "{ n = IsNaN(x) f = Cast<to = 1>(n) y = Add(f, x) }",
    "{ t = Floor(x) n = IsNaN(x) z = Constant<value_float = 3.0>() w = Where(n, z, t) y = Neg(w) }",
    "{ n = IsNaN(x) i = Cast<to = 7>(x) f = Cast<to = 1>(i) g = Cast<to = 1>(n) y = Add(f, g) }",
    (
        "{ n = IsNaN(x) f = Cast<to = 1>(n) c = Constant<value = bool {1}>()"
        " y = If(c) <then_branch = a () => (float[N, C] p) { p = Identity(x) },"
        " else_branch = b () => (float[N, C] q) { q = Identity(f) }> }"
    ),
)


def _model(body: str) -> Artifact:
    return Artifact.from_bytes(onnx.parser.parse_model(f"{_HEAD} {body}").SerializeToString(), Format.ONNX)


def _trees(tracks: list[int]) -> Artifact:
    node = helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_treeids=[0, 0, 0],
        nodes_nodeids=[0, 1, 2],
        nodes_featureids=[0, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_values=[0.5, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 0],
        nodes_falsenodeids=[2, 0, 0],
        nodes_missing_value_tracks_true=tracks,
        target_treeids=[0, 0],
        target_nodeids=[1, 2],
        target_ids=[0, 0],
        target_weights=[1.0, 2.0],
    )
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size]) for name, size in (("x", 2), ("y", 1)))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=8)
    return Artifact.from_bytes(model.SerializeToString(), Format.ONNX)


def _answer_to_nan(model: Artifact) -> Array:
    loaded = get_engine("onnxruntime").load(model, {})
    try:
        return loaded.forward({"x": np.array([[np.nan, 1.0], [0.25, np.nan]], np.float32)})["y"]
    finally:
        loaded.unload()


@pytest.mark.parametrize("body", [*_TAKING, f"{{ y = {_IMPUTER.format('nan')} (x) }}"])
def test_an_input_takes_missing_values_if_all_its_operators_treat_nan_as_a_value(body: str) -> None:
    model = _model(body)
    assert takes_missing(model) == {"x"}
    assert np.isfinite(_answer_to_nan(model)).all()


@pytest.mark.parametrize("body", [*_COMPUTING, f"{{ y = {_IMPUTER.format('0.0')} (x) }}"])
def test_an_input_that_a_model_computes_with_takes_none(body: str) -> None:
    assert takes_missing(_model(body)) == frozenset()


def test_trees_take_missing_values_if_one_of_their_nodes_has_a_branch_for_them() -> None:
    model = _trees([1, 0, 0])
    assert takes_missing(model) == {"x"}
    assert _answer_to_nan(model).tolist() == [[1.0], [1.0]]
    assert takes_missing(_trees([0, 0, 0])) == frozenset()


def test_other_formats_and_broken_graphs_take_none() -> None:
    assert takes_missing(Artifact.from_bytes(b"IsNaN", Format.TORCHSCRIPT)) == frozenset()
    assert takes_missing(Artifact.from_bytes(b"\x3aIsNaN", Format.ONNX)) == frozenset()
