"""The QDQ form of graphs that no exporter writes twice the same: names, sharing, outputs inside, subgraphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import linear_graphs
from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.offline.apart import apart
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.qdq_writer import weight_scales
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import Array, DataType

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
X = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)
IMAGES = np.random.default_rng(2).standard_normal((16, 3, 8, 8)).astype(np.float32)


def int8(artifact: Artifact, x: Array, placement: QdqPlacement = QdqPlacement.LINEAR) -> Artifact:
    found = ranges(collect(artifact, {"x": x}), RangeMethod.MIN_MAX, SCHEME)
    return quantize(artifact, found, SCHEME, placement)


def errors(changed: Artifact, original: Artifact, x: Array) -> dict[str, float]:
    """The relative error of each output."""
    want, got = (get_engine("onnxruntime").load(one, {"threads": 1}).forward({"x": x}) for one in (original, changed))
    assert want.keys() == got.keys()
    return {name: float(np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name])) for name in want}


def graph_of(artifact: Artifact) -> onnx.GraphProto:
    proto = onnx.load_model_from_string(artifact.data)
    onnx.checker.check_model(proto, full_check=True)
    return proto.graph


STEMS = ("x", "w", "b", "inner", "y")
SUFFIXES = (
    *("", "_scale", "_zero_point", "_quantized", "_quantized_scale", "_QuantizeLinear", "_DequantizeLinear"),
    *("_QuantizeLinear_Input", "_QuantizeLinear_Output", "_DequantizeLinear_Output", "_source", "_rounded", "_folded"),
)
NAMES = st.builds(str.__add__, st.sampled_from(STEMS), st.sampled_from(SUFFIXES))


def answers_under(names: Sequence[str], placement: QdqPlacement) -> Array:
    """The answers of a quantised network whose tensors have ``names``."""
    x, w, b, first, relu, w2, y = names
    rng = np.random.default_rng(0)
    arrays = {w: rng.normal(0, 0.3, (16, 16)), b: rng.normal(0, 0.3, 16), w2: rng.normal(0, 0.3, (16, 16))}
    nodes = [
        helper.make_node("Gemm", [x, w, b], [first], beta=0.5),
        helper.make_node("Relu", [first], [relu]),
        helper.make_node("MatMul", [relu, w2], [y]),
    ]
    graph = helper.make_graph(
        nodes,
        "names",
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["N", 16])],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, ["N", 16])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    recipe = PtqRecipe(placement=placement, equalize=False)
    made = quantize_with(recipe, Artifact.from_bytes(model.SerializeToString()), make_dataset({x: X}, None), SCHEME)
    graph_of(made)
    return next(iter(get_engine("onnxruntime").load(made, {"threads": 1}).forward({x: X}).values()))


@cache
def ordinary_answers(placement: QdqPlacement) -> Array:
    return answers_under("iklmnop", placement)


@settings(max_examples=40, deadline=None)
@given(st.lists(NAMES, min_size=7, max_size=7, unique=True), st.sampled_from(QdqPlacement))
def test_tensors_may_have_any_names(names: list[str], placement: QdqPlacement) -> None:
    np.testing.assert_array_equal(answers_under(names, placement), ordinary_answers(placement))


@settings(max_examples=40, deadline=None)
@given(linear_graphs.chains(), st.sampled_from(QdqPlacement))
def test_a_shared_weight_is_rounded_for_each_layout(models: tuple[Artifact, Artifact], placement: QdqPlacement) -> None:
    odd, _ = models
    graph = graph_of(int8(odd, linear_graphs.ROWS, placement))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    written = {node.output[0]: node for node in graph.node}
    for node in graph.node:
        if node.op_type not in ("Gemm", "MatMul") or node.input[1] not in written:
            continue
        integers, scale, _ = (constants[name] for name in written[node.input[1]].input)
        (axis,) = (attribute.i for attribute in written[node.input[1]].attribute)
        is_transposed = any(a.name == "transB" and a.i for a in node.attribute)
        assert axis == (0 if is_transposed else 1)
        largest = np.abs(np.moveaxis(integers, axis, 0).astype(int)).max(axis=1)
        # Each output channel uses all levels, unless its bias needs a larger scale.
        assert ((largest == SCHEME.weight_limit) | (scale > 0)).all()
        assert (largest == SCHEME.weight_limit).any()


@pytest.mark.parametrize("activation", ["Relu", "Clip"])
@pytest.mark.parametrize("placement", QdqPlacement)
def test_the_result_of_a_convolution_that_is_an_output_is_not_clipped(activation: str, placement: QdqPlacement) -> None:
    n = Network()
    inner = n.op("Conv", "x", n.normal(4, 3, 3, 3), n.weight(np.full(4, -2, np.float32)), name="inner", pads=[1] * 4)
    bounds = [n.weight(np.float32(0)), n.weight(np.float32(3))] if activation == "Clip" else []
    y = n.conv(n.op(activation, inner, *bounds), 4, 4, 1)
    artifact = n.artifact({"x": ["N", 3, 8, 8]}, {inner: ["N", 4, 8, 8], y: ["N", 4, 8, 8]})
    assert max(errors(int8(artifact, IMAGES, placement), artifact, IMAGES).values()) < 0.05


@pytest.mark.parametrize("placement", QdqPlacement)
@pytest.mark.parametrize("shadows", [False, True])
def test_branches_may_read_outer_products(placement: QdqPlacement, shadows: bool) -> None:
    n = Network()
    w = n.normal(16, 16, fan_in=16)
    n.op("MatMul", "x", w, name="outer")

    def branch(result: str) -> onnx.GraphProto:
        inner = "later" if shadows else f"inner_{result}"
        nodes = [helper.make_node("MatMul", ["outer", w], [inner]), helper.make_node("Relu", [inner], [result])]
        return helper.make_graph(nodes, result, [], [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)])

    n.op("If", n.weight(np.array(True)), name="chosen", then_branch=branch("yes"), else_branch=branch("no"))
    n.op("MatMul", "chosen", w, name="later_" if shadows else "later")
    n.op("Neg", n.nodes[-1].output[0], name="y")
    artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 16]})
    made = quantize_with(PtqRecipe(placement=placement), artifact, make_dataset({"x": X}, None), SCHEME)
    graph_of(made)
    assert errors(made, artifact, X)["y"] < 0.06


@pytest.mark.parametrize("placement", QdqPlacement)
@pytest.mark.parametrize("before", ["Neg", "Relu", "Conv"])
@pytest.mark.parametrize("moves", [1, 2])
def test_branches_may_read_what_is_moved_for_them(before: str, moves: int, placement: QdqPlacement) -> None:
    def branch(operator: str, source: str) -> onnx.GraphProto:
        node = helper.make_node(operator, [source], [operator.lower()])
        return helper.make_graph([node], operator, [], [helper.make_tensor_value_info(operator.lower(), 1, None)])

    n = Network()
    inner = n.conv("x", 4, 4)
    inner = n.op(before, inner) if before != "Conv" else inner
    moved = n.op("Transpose", inner, perm=[0, 1, 3, 2])
    moved = n.op("Squeeze", moved, n.weight(np.array([2]))) if moves == 2 else moved
    n.op("If", n.weight(np.array(True)), name="y", then_branch=branch("Tanh", moved), else_branch=branch("Exp", moved))
    n.op("Add", n.conv(inner, 4, 4), inner, name="z")
    shape = ["N", 4, 5, 1]
    artifact = n.artifact({"x": shape}, {"y": ["N", 4, *([1, 5] if moves == 1 else [5])], "z": shape})  # type: ignore[list-item]
    x = np.random.default_rng(0).standard_normal((30, 4, 5, 1)).astype(np.float32)
    made = int8(artifact, x, placement)
    got, want = (apart.forward(model, {"x": x}, as_written=False) for model in (made, artifact))
    assert all(np.linalg.norm(got[name] - want[name]) < 0.05 * np.linalg.norm(want[name]) for name in want)


def test_float_operators_read_what_float_operators_compute() -> None:
    n = Network()
    hidden = n.op("Tanh", n.op("MatMul", "x", n.normal(16, 16, fan_in=16)), name="hidden")
    n.op("MatMul", hidden, n.normal(16, 16, fan_in=16), name="y")
    n.op("Neg", hidden, name="z")
    n.op("Neg", "x", name="same")
    shape = ["N", 16]
    artifact = n.artifact({"x": shape}, {"y": shape, "z": shape, "same": shape, "hidden": shape})  # type: ignore[dict-item]
    found = get_engine("onnxruntime").load(int8(artifact, X), {}).forward({"x": X})
    assert (found["same"] == -X).all()
    assert (found["hidden"] == -found["z"]).all()
    assert len(np.unique(found["hidden"])) > 256


@pytest.mark.parametrize("placement", QdqPlacement)
def test_a_weight_that_is_an_output_stays_as_it_is(placement: QdqPlacement) -> None:
    n = Network()
    w, alone = n.normal(16, 16, fan_in=16), n.normal(5)
    n.op("Relu", n.op("MatMul", "x", w), name="y")
    artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 16], w: [16, 16], alone: [5]})
    found = errors(int8(artifact, X, placement), artifact, X)
    assert found[w] == found[alone] == 0
    assert found["y"] < 0.05


def normalised(kind: str) -> Artifact:
    """x (N, 6, 16) to y (N, 6, 16): a product, a normalisation of single operators, and a product."""
    n = Network()
    hidden = n.op("Add", "x", n.op("MatMul", "x", n.normal(16, 16, fan_in=16)))
    centred = n.op("Sub", hidden, n.op("ReduceMean", hidden, axes=[-1])) if kind == "mean" else hidden
    variance = n.op("ReduceMean", n.op("Mul", centred, centred), axes=[-1])
    root = n.op("Sqrt", n.op("Add", variance, n.weight(np.float32(1e-5))))
    if kind == "root":
        scaled = n.op("Mul", n.op("Div", n.weight(np.float32(1)), root), centred)
    else:
        scaled = n.op("Div", centred, root) if kind == "mean" else n.op("Mul", centred, n.op("Reciprocal", root))
    normal = n.op("Add", n.op("Mul", scaled, n.normal(16)), n.normal(16))
    n.op("Add", n.op("MatMul", normal, n.normal(16, 16, fan_in=16)), n.normal(16), name="y")
    return n.artifact({"x": ["N", 6, 16]}, {"y": ["N", 6, 16]})


@pytest.mark.parametrize("kind", ["mean", "root", "reciprocal"])
def test_a_normalisation_of_single_operators_loses_no_more_in_the_wide_placement(kind: str) -> None:
    rows = np.geomspace(0.1, 3, 6)[:, None] * np.random.default_rng(3).standard_normal((64, 6, 16))
    x = rows.astype(np.float32)
    placements = QdqPlacement.LINEAR, QdqPlacement.WIDE
    linear, wide = (errors(int8(normalised(kind), x, place), normalised(kind), x)["y"] for place in placements)
    assert linear < 0.1
    assert wide < 1.1 * linear


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**16), st.floats(1e-6, 1e3), st.floats(1e-9, 1e9), st.integers(0, 1))
def test_the_scale_of_a_channel_holds_its_weights_and_its_bias(seed: int, step: float, size: float, axis: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, rng.choice([0.0, 1e-12, 1.0], 4)[:, None], (4, 6)).astype(np.float32)
    bias = (size * rng.normal(0, 1, 4)).astype(np.float32)
    scales = weight_scales(weight if axis == 0 else weight.T, axis, 127, bias, step)
    assert scales.dtype == np.float32
    assert (scales > 0).all()
    largest = np.abs(weight).max(axis=1)
    assert (np.round(largest / scales) <= 127).all()
    products = (scales * np.float32(step)).astype(np.float64)
    assert (np.abs(bias) / products <= 2**30).all()  # the integers need no clipping
    whole = weight_scales(weight, None, 127, bias, step)
    assert whole.shape == ()
    assert np.round(largest.max() / whole) <= 127
    assert (np.abs(bias) / np.float64(whole * np.float32(step)) <= 2**30).all()
    # Where all weights are zero, the bias is as exact as FP32.
    zero = largest == 0
    np.testing.assert_allclose(np.round(bias / products)[zero] * products[zero], bias[zero], rtol=1e-6)
