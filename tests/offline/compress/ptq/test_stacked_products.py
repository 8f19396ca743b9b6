"""MatMul with a constant on the left, and with a stack of constant matrices, in every engine, placement and method."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import available_engines
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.precision.sqnr import weight_noise
from penstock.offline.compress.ptq.bias_correction import correct_biases
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.equalize import equalize
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import IntegerScheme, symmetric
from penstock.offline.look.cost import cost
from penstock.offline.sessions import loaded
from penstock.tensor import Array, DataType

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
ENGINES = [name for name in ("onnxruntime", "openvino") if name in available_engines()]


def product(weight: tuple[int, ...], source: tuple[int, ...], *, left: bool, bias: bool) -> Artifact:
    """Two products with a Relu between them, of x (N, …)."""
    n = Network(sum(weight) + len(source))
    constants = n.normal(*weight, fan_in=weight[-1 if left else -2])
    y = n.op("MatMul", constants, "x") if left else n.op("MatMul", "x", constants)
    if bias:
        y = n.op("Add", y, n.normal(1))
    n.op("Relu", y, name="y")
    rank = max(len(weight), len(source) + 1)
    return n.artifact({"x": ["N", *source]}, {"y": [f"d{axis}" for axis in range(rank)]})


def rows(source: tuple[int, ...], count: int = 12, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, *source)).astype(np.float32)


def run(model: Artifact, x: Array, engine: str = "onnxruntime", *, as_written: bool = False) -> Array:
    with loaded(model, engine=engine, as_written=as_written) as running:
        return running.forward({"x": x})["y"].astype(np.float64)


def int8(model: Artifact, x: Array, placement: QdqPlacement, scheme: IntegerScheme = SCHEME) -> Artifact:
    return quantize(model, ranges(collect(model, {"x": x}), RangeMethod.MIN_MAX, scheme), scheme, placement)


def integer_weights(model: Artifact) -> list[tuple[int, ...]]:
    tensors = onnx.load_model_from_string(model.data).graph.initializer
    return [tuple(one.dims) for one in tensors if one.data_type == DataType.INT8.onnx and len(one.dims) > 1]


CASES = {
    "left": ((5, 6), (6, 7), True),
    "left of many axes": ((5, 6), (2, 6, 7), True),
    "left stack": ((3, 5, 6), (3, 6, 7), True),
    "left of more axes than x": ((2, 3, 5, 6), (6, 7), True),
    "left of one row": ((1, 6), (6, 7), True),
    "stack": ((3, 6, 5), (3, 4, 6), False),
    "stack of more axes than x": ((2, 3, 6, 5), (4, 6), False),
    "stack of one": ((1, 6, 5), (4, 6), False),
    "stack for many": ((6, 5), (3, 4, 6), False),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_all_become_integer_and_answer_alike(case: str, engine: str) -> None:
    weight, source, left = CASES[case]
    if case.endswith("than x"):  # the batch axes of the stack must fit those of x
        source = (weight[-3], *source)
    model, x = (
        product(weight, source, left=left, bias=engine == "openvino"),
        rows(source, 2 if len(weight) == 4 else 12),
    )
    for placement, scheme in ((QdqPlacement.LINEAR, SCHEME), (QdqPlacement.WIDE, symmetric(SCHEME))):
        made = int8(model, x, placement, scheme)
        assert len(integer_weights(made)) == 1
        for tried in (x, x * 0, x * 50, x[:1] if len(weight) < 4 else x):
            want, got = run(model, tried), run(made, tried.copy(), engine)
            assert want.shape == got.shape
            if np.abs(tried).max() > np.abs(x).max():
                assert np.isfinite(got).all()  # clipped to the calibrated ranges
            else:
                np.testing.assert_allclose(got, want, atol=0.06 * np.abs(run(model, x)).max())
        check_explained(model, made, make_dataset({"x": x}, None))


@settings(max_examples=15, deadline=None)
@given(
    left=st.booleans(),
    stack=st.lists(st.integers(1, 3), max_size=2),
    sizes=st.tuples(*[st.integers(2, 9)] * 3),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_shapes(left: bool, stack: list[int], sizes: tuple[int, int, int], bias: bool, seed: int) -> None:
    first, inner, last = sizes
    weight = (*stack, first, inner) if left else (*stack, inner, last)
    source = (*stack, inner, last) if left else (*stack, first, inner)
    model, x = product(weight, source, left=left, bias=bias), rows(source, 8, seed)
    plain = FloatModel(model).artifact()
    np.testing.assert_allclose(run(plain, x), run(model, x), rtol=1e-5, atol=1e-5)
    made = int8(model, x, QdqPlacement.WIDE)
    ends = max(float(np.abs(run(model, x)).max()), 1e-3)
    np.testing.assert_allclose(run(made, x), run(model, x), atol=0.08 * ends)
    for count in (1, 0)[: 1 if stack or left else 2]:  # ONNX Runtime does not broadcast constants to no rows
        assert run(made, x[:count]).shape == run(model, x[:count]).shape
    check_explained(model, made, make_dataset({"x": x}, None))


def test_a_left_constant_has_one_scale_per_channel_and_a_stack_one() -> None:
    for case, scales in (("left", 5), ("stack", 1)):
        weight, source, left = CASES[case]
        made = int8(product(weight, source, left=left, bias=False), rows(source), QdqPlacement.LINEAR)
        graph = onnx.load_model_from_string(made.data).graph
        tensors = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
        found = [tensors[node.input[1]].size for node in graph.node if node.input[0] in tensors]
        assert found == [scales]


@pytest.mark.parametrize("case", ["left", "left stack", "stack"])
def test_all_methods_of_a_build_take_them(case: str) -> None:
    weight, source, left = CASES[case]
    model, data = product(weight, source, left=left, bias=True), make_dataset({"x": rows(source, 48)}, None)
    made = quantize_with(PtqRecipe(placement=QdqPlacement.WIDE), model, data, SCHEME)
    check_explained(model, made, data)
    plain = int8(model, data.inputs["x"], QdqPlacement.LINEAR)
    check_explained(model, correct_biases(model, plain, data), data)
    known = FloatModel(model)
    noise = weight_noise(known, known.integer_nodes(QdqPlacement.LINEAR), SCHEME)
    assert all(0 < one.rounding < one.signal for one in noise.values())


def test_constants_that_cannot_be_turned_stay() -> None:
    n = Network()
    n.op("Relu", n.op("MatMul", n.normal(5, 6), "x"), name="y")  # x is a vector
    vector = n.artifact({"x": [6]}, {"y": [5]})
    n = Network()
    n.op("Relu", n.op("MatMul", n.normal(6), "x"), name="y")  # the constant is a vector
    column = product((3, 6, 1), (3, 4, 6), left=False, bias=False)  # OpenVINO does not load it in INT8
    for model in (vector, column, n.artifact({"x": ["N", 6, 4]}, {"y": ["N", 4]})):
        assert FloatModel(model).integer_nodes(QdqPlacement.WIDE) == []


def test_equalisation_leaves_them_alone() -> None:
    n = Network()
    n.op("MatMul", n.normal(5, 4), n.op("Relu", n.op("MatMul", "x", n.normal(6, 3))), name="y")
    model = n.artifact({"x": ["N", 4, 6]}, {"y": ["N", 5, 3]})
    x = rows((4, 6))
    np.testing.assert_allclose(run(equalize(model, make_dataset({"x": x}, None)), x), run(model, x), atol=1e-5)


def test_inspect_counts_their_work() -> None:
    weight, source, left = CASES["left"]
    found = cost(product(weight, source, left=left, bias=True), {"x": (2, *source)})
    assert found.quantisable == found.linear == 1
    assert found.share_of_work == 1
