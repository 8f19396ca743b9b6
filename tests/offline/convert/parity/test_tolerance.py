"""The rounding error of a call: samples of it, ties, overflow."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from penstock.offline.convert.parity.nodes import Nodes
from penstock.offline.convert.parity.tolerance import UNITS, RoundingModel
from tests.compared import LAYER_NORM, parsed


def spread(model: onnx.ModelProto, x: np.ndarray, name: str = "y") -> float:
    rounding = RoundingModel(Nodes(model), {"x": x}, [name])
    return max(float(np.abs(one - rounding.exact(name)).max()) for one in rounding.noisy(name))


def test_exact_is_in_double_precision() -> None:
    rounding = RoundingModel(
        Nodes(parsed("g (float[N] x) => (float[N] y) { y = Exp(x) }")), {"x": np.ones(1, np.float32)}, ["y"]
    )
    assert rounding.exact("y")[0] == np.exp(np.float64(1))


def test_the_mean_of_equal_values_is_not_exact() -> None:
    """Otherwise the tolerance of a layer normalisation of constant rows is 0, although rounding is multiplied by 1/sqrt(epsilon)."""
    x = np.full((2, 8), 0.7301, np.float32)
    assert 1e-5 < spread(parsed(LAYER_NORM), x) < 1e-2


def test_the_noise_of_ordinary_rows_is_a_few_units() -> None:
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    assert spread(parsed(LAYER_NORM), x) < 200 * UNITS[np.dtype(np.float32)]


def test_sums_of_integers_are_exact() -> None:
    model = parsed("g (float[N,8] x) => (float[N,1] y) <int64[1] last = {-1}> { y = ReduceSum(x, last) }")
    assert spread(model, np.arange(16, dtype=np.float32).reshape(2, 8)) == 0.0


def test_a_tie_differs_in_some_runs() -> None:
    model = parsed(
        "g (float[N,4] x) => (int64[N] k) { e = Exp(x) s = Log(e) d = Sub(s, x) k = ArgMax<axis=1,keepdims=0>(d) }"
    )
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    runs = RoundingModel(Nodes(model), {"x": x}, ["k"]).noisy("k")
    assert len(runs) == 8
    assert any((one != runs[0]).any() for one in runs[1:])


def test_overflow_is_known_after_the_exact_run() -> None:
    model = parsed("g (float[N] x) => (float[N] y) { e = Exp(x) y = Log(e) }")
    for value, overflows in ((1.0, False), (200.0, True)):
        rounding = RoundingModel(Nodes(model), {"x": np.full(1, value, np.float32)}, ["y"])
        rounding.exact("y")
        assert rounding.overflows is overflows


def test_a_graph_that_does_not_run_has_no_values() -> None:
    model = parsed("g (float[N] x, float[M] z) => (float[N] y) { y = Add(x, z) }")
    given = {"x": np.ones(2, np.float32), "z": np.ones(3, np.float32)}
    rounding = RoundingModel(Nodes(model), given, ["y"])
    assert rounding.exact("y") is None
    assert rounding.noisy("y") == []


def test_quantised_values_change_by_a_step_only_if_asked() -> None:
    model = parsed(
        "g (float[N] x) => (float[N] y) <float step = {0.5}, int8 zero = {0}> "
        "{ q = QuantizeLinear(x, step, zero) y = DequantizeLinear(q, step, zero) }"
    )
    assert numpy_helper.to_array(model.graph.initializer[0]) == 0.5
    rounding = RoundingModel(Nodes(model), {"x": np.full(4, 0.4, np.float32)}, ["y"])
    assert rounding.has_steps
    assert all((one == 0.5).all() for one in rounding.noisy("y"))


_STEPS_OF_NODES = """g (float[N,8] x) => (float[N,8] y) {
    step = Constant<value_float=0.5>()
    same = Identity(step)
    zero = Constant<value = int8 {0}>()
    q = QuantizeLinear(x, same, zero)
    y = DequantizeLinear(q, same, zero) }"""


def test_the_step_can_be_the_result_of_nodes() -> None:
    """The traced exporter of PyTorch writes constants as nodes."""
    nodes = Nodes(parsed(_STEPS_OF_NODES))
    assert nodes.steps == {"x": 0.5}


def test_no_errors_within_a_step_have_a_larger_mean_than_the_noise() -> None:
    x = np.random.default_rng(0).uniform(-30, 30, (64, 8)).astype(np.float32)
    model = parsed(_STEPS_OF_NODES.replace("QuantizeLinear(x,", "QuantizeLinear(m,").replace("q =", "m = Neg(x)\n q ="))
    rounding = RoundingModel(Nodes(model), {"x": x}, ["q"])
    runs = rounding.noisy("q", stepped=True, count=48)
    means = [float(np.mean(one - rounding.exact("q"))) for one in runs]
    assert 0.15 < np.std(means) < 0.45


def test_many_runs_begin_with_the_few() -> None:
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    rounding = RoundingModel(Nodes(parsed(LAYER_NORM)), {"x": x}, ["y"])
    few, many = rounding.noisy("y"), rounding.noisy("y", count=12)
    assert (len(few), len(many)) == (8, 12)
    assert np.array_equal(few, many[:8])


def test_values_in_fp16_have_a_relative_error_in_common() -> None:
    """HardSwish multiplies with 1/6, which is a constant with an error of its own."""
    model = parsed("g (float16[N] x) => (float16[N] y) { y = HardSwish(x) }")
    x = np.random.default_rng(0).uniform(0.5, 2, 1 << 14).astype(np.float16)
    rounding = RoundingModel(Nodes(model), {"x": x}, ["y"])
    gains = [float(np.mean(one / rounding.exact("y") - 1)) for one in rounding.noisy("y", count=24)]
    assert 0.1 < np.std(gains) / UNITS[np.dtype(np.float16)] < 1.0
