"""How much rounding may change the results of a graph."""

import numpy as np
import onnx

from penstock.offline.convert.parity.nodes import Nodes
from penstock.offline.convert.parity.tolerance import RoundingModel


def rounding(body: str, x: np.ndarray, result: str = "float[N] y") -> RoundingModel:
    text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => ({result}) {{ {body} }}'
    return RoundingModel(Nodes(onnx.parser.parse_model(text)), {"x": x}, ["y"])


def test_exact_is_in_double_precision():
    found = rounding("e = Exp(x) y = Log(e)", np.array([1e-3], np.float32))
    assert abs(found.exact("y")[0] - np.float64(np.float32(1e-3))) < 1e-15
    assert not found.overflows


def test_noise_shows_the_conditioning_of_the_graph():
    x = np.array([1e-4], np.float32)
    spread = [np.ptp(rounding(body, x).noisy("y")) for body in ("y = Mul(x, x)", "e = Exp(x) y = Log(e)")]
    assert spread[0] < 1e-12
    assert spread[1] > 1e-7


def test_whole_numbers_have_no_noise():
    assert np.ptp(rounding("y = Neg(x)", np.array([3.0], np.float32)).noisy("y")) == 0


def test_a_tie_is_decided_by_noise():
    body = "e = Exp(x) s = Log(e) d = Sub(s, x) y = ArgMax<axis = 0, keepdims = 1>(d)"
    found = rounding(body, np.array([0.1, 0.2, 0.3], np.float32), "int64[1] y").noisy("y")
    assert len({int(one[0]) for one in found}) > 1


def test_overflow_of_the_type_is_noted():
    found = rounding("y = Exp(x)", np.array([100.0], np.float32))
    assert np.isfinite(found.exact("y")).all()
    assert found.overflows


def test_a_graph_that_does_not_run_explains_nothing():
    found = rounding("y = Add(x, x)", np.array(["a"], object))
    assert found.exact("y") is None
    assert found.noisy("y") == []
