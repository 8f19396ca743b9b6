from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings

from linear_graphs import ROWS, chains, error, run
from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.offline.compress.low_rank.factorize import FactorizeOptions, factorize
from penstock.offline.compress.precision.dynamic import DynamicOptions, quantize_dynamic
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights
from penstock.offline.compress.ptq.bias_correction import correct_biases
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.equalize import equalize
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.ptq.smooth_quant import smooth_quant
from penstock.offline.optimize.linear import form_of, linear_form, make_plain, read_linear
from penstock.offline.optimize.model import load_model, to_artifact
from penstock.offline.optimize.optimizer import optimize
from penstock.tensor import DataType

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")


def node(op_type, *arrays, **attributes):
    inputs = [ir.val("x", ir.DataType.FLOAT)]
    for index, array in enumerate(arrays):
        inputs.append(ir.val(f"w{index}", const_value=ir.tensor(array)))
    made = ir.node(op_type, inputs, attributes)
    ir.Graph(inputs[:1], made.outputs, nodes=[made], initializers=inputs[1:])
    return made


@pytest.mark.parametrize(
    ("op_type", "shape", "attributes", "channels"),
    [
        ("Conv", (6, 2, 3, 3), {"group": 2}, 6),
        ("ConvTranspose", (4, 3, 2, 2), {"group": 2}, 6),
        ("Gemm", (3, 5), {}, 5),
        ("Gemm", (5, 3), {"transB": 1}, 5),
    ],
)
def test_channels_of_each_operator(op_type, shape, attributes, channels):
    assert read_linear(node(op_type, np.ones(shape, np.float32), **attributes)).channels == channels


def test_beta_is_in_the_bias():
    made = node("Gemm", np.ones((3, 2), np.float32), np.array([[1, 2]], np.float32), beta=0.5)
    np.testing.assert_array_equal(read_linear(made).bias, [0.5, 1.0])


def test_other_operators_and_types_are_not_linear():
    assert read_linear(None) is None
    assert read_linear(node("MatMul", np.ones((3, 2), np.float32))) is None
    assert read_linear(node("Gemm", np.ones((3, 2), np.int32))) is None


def test_weights_that_leave_the_range_are_not_folded():
    made = node("Gemm", np.full((3, 2), 6e4, np.float16))
    follower = ir.node("Mul", [made.outputs[0], ir.val("k")])
    made.graph.append(follower)
    assert not read_linear(made).fold(follower, np.full(2, 10.0), np.zeros(2))
    assert [each.op_type for each in made.graph] == ["Gemm", "Mul"]


@pytest.mark.parametrize(
    ("op_type", "attributes", "axes", "is_plain"),
    [
        ("Conv", {}, (1, 0), True),
        ("Conv", {"group": 2}, (1, 0), False),
        ("ConvTranspose", {}, (0, 1), True),
        ("MatMul", {}, (0, 1), True),
        ("Gemm", {}, (0, 1), True),
        ("Gemm", {"transB": 1}, (1, 0), True),
        ("Gemm", {"transA": 1}, (0, 1), False),
        ("Gemm", {"alpha": 0.5}, (0, 1), False),
        ("Gemm", {"beta": 2.0}, (0, 1), False),
    ],
)
def test_the_form_says_which_axes_a_layer_sums_over_and_writes(
    op_type: str, attributes: dict[str, float], axes: tuple[int, int], is_plain: bool
) -> None:
    form = form_of(node(op_type, np.ones((2, 2), np.float32), **attributes))
    assert form is not None
    assert (form.inputs, form.outputs) == axes
    assert form.is_plain == is_plain
    assert linear_form(op_type, attributes.get) == form


def test_other_operators_have_no_linear_form() -> None:
    assert linear_form("Add", {}.get) is None


@settings(max_examples=60, deadline=None)
@given(chains())
def test_a_plain_gemm_is_the_same_function(models: tuple[Artifact, Artifact]) -> None:
    odd, written_out = models
    model = load_model(odd)
    for each in list(model.graph):
        make_plain(each)
    plain = to_artifact(model)
    forms = [form for each in model.graph if (form := form_of(each)) is not None]
    assert all(form.is_plain for form in forms)
    assert not any(make_plain(each) for each in list(model.graph))
    assert error(plain, odd) < 1e-5
    assert error(written_out, odd) < 1e-5


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("bias", ["rows", "computed"])
def test_a_bias_that_is_not_one_per_channel_is_added_by_another_node(bias: str, beta: float) -> None:
    n = Network()
    name = n.weight(np.arange(5, dtype=np.float32)[:, None]) if bias == "rows" else "x"
    n.op("Gemm", "x", n.normal(8, 8), name, alpha=2.0, beta=beta, name="y")
    odd = n.artifact({"x": [5, 8]}, {"y": [5, 8]})
    model = load_model(odd)
    assert make_plain(next(iter(model.graph)))
    gemm = next(each for each in model.graph if each.op_type == "Gemm")
    assert len(gemm.inputs) == 2
    x = ROWS[:5]
    np.testing.assert_allclose(run(to_artifact(model), x), run(odd, x), rtol=1e-5, atol=1e-6)


def test_a_gemm_whose_scaled_weight_is_not_finite_stays() -> None:
    made = node("Gemm", np.full((3, 2), 3e38, np.float32), alpha=2.0)
    assert not make_plain(made)
    assert made.attributes["alpha"].as_float() == 2.0


def passes(artifact: Artifact) -> Artifact:
    return optimize(artifact, [{"x": ROWS}])[0]


DATA = make_dataset({"x": ROWS}, None)
EXACT: dict[str, Callable[[Artifact], Artifact]] = {
    "passes": passes,
    "equalise": lambda artifact: equalize(artifact, DATA),
    "smooth": lambda artifact: smooth_quant(artifact, DATA),
    "low rank": lambda artifact: factorize(artifact, DATA, FactorizeOptions(rank=2, samples=16)),
}
ROUNDED: dict[str, Callable[[Artifact], Artifact]] = {
    "weights": lambda artifact: quantize_weights(artifact, None, WeightOnlyOptions(bits=8, least_weights=1)),
    "dynamic": lambda artifact: quantize_dynamic(artifact, DATA, DynamicOptions(1)),
    "linear": lambda artifact: int8(artifact, QdqPlacement.LINEAR),
    "wide": lambda artifact: int8(artifact, QdqPlacement.WIDE),
}


def int8(artifact: Artifact, placement: QdqPlacement) -> Artifact:
    found = ranges(collect(artifact, DATA), RangeMethod.MIN_MAX, SCHEME)
    return correct_biases(artifact, quantize(artifact, found, SCHEME, placement), DATA)


@pytest.mark.parametrize("method", EXACT)
@settings(max_examples=30, deadline=None)
@given(chains(rank=2))
def test_methods_that_keep_the_function_read_every_form(method: str, models: tuple[Artifact, Artifact]) -> None:
    odd, _ = models
    assert error(EXACT[method](odd), odd) < 1e-4


@pytest.mark.parametrize("method", ROUNDED)
@settings(max_examples=30, deadline=None)
@given(chains())
def test_methods_that_round_lose_no_more_on_an_odd_form(method: str, models: tuple[Artifact, Artifact]) -> None:
    odd, plain = models
    assert error(ROUNDED[method](odd), odd) < 0.03 + 2 * error(ROUNDED[method](plain), plain)
