"""Comparison of one tensor: what counts as equal, as rounding, and as a difference."""

from __future__ import annotations

from math import inf, nan

import numpy as np

from penstock.offline.convert.parity.compare import compare, statistics
from penstock.offline.convert.parity.nodes import Nodes
from penstock.offline.convert.parity.tolerance import RoundingModel
from tests.compared import parsed

X = np.linspace(-2, 2, 8, dtype=np.float32)
EXP = parsed("g (float[N] x) => (float[N] y) { y = Exp(x) }")


def rounding(x: np.ndarray = X, text: str = "") -> RoundingModel:
    model = parsed(text) if text else EXP
    return RoundingModel(Nodes(model), {"x": x}, [value.name for value in model.graph.output])


def test_equal_tensors_need_no_explanation() -> None:
    found = compare("y", np.exp(X), np.exp(X), rounding())
    assert found.reason == ""
    assert found.error == 0.0
    assert found.decides


def test_a_difference_beyond_rounding_has_a_reason() -> None:
    found = compare("y", np.exp(X) * np.float32(1.001), np.exp(X), rounding())
    assert "differs by 0.001" in found.reason
    assert found.error > found.tolerance


def test_an_error_of_the_engine_is_no_rounding() -> None:
    """The error of a kernel is also the difference of the graph from its results in double precision."""
    found = compare("y", np.exp(X), np.exp(X) * np.float32(1.001), rounding())
    assert "differs by 0.001" in found.reason


def test_a_kernel_may_compute_small_values_as_differences() -> None:
    """ONNX Runtime computes Elu as ``exp(x) - 1``."""
    x = np.linspace(-3e-6, -1e-6, 8, dtype=np.float32)
    got = np.exp(x) - np.float32(1)
    given = rounding(x, "g (float[N] x) => (float[N] y) { y = Elu(x) }")
    found = compare("y", np.expm1(x), got, given)
    assert found.error > 1e-3
    assert found.reason == ""


def test_types_and_shapes_must_be_equal() -> None:
    assert "is int64, but float32" in compare("y", X, X.astype(np.int64), rounding()).reason
    assert "has shape [8], but [2]" in compare("y", X[:2], X, rounding()).reason


def test_nan_and_infinity_are_compared_by_place() -> None:
    want = np.array([nan, inf, 1.0], np.float32)
    given = rounding(np.array([nan, inf, 0.0], np.float32))
    assert compare("y", want, want, given).reason == ""
    assert "at 1 other places" in compare("y", want, np.array([0.0, inf, 1.0], np.float32), given).reason


def test_extreme_values_may_overflow() -> None:
    x = np.full(2, 100.0, np.float32)
    want, got = np.array([1.0, 2.0], np.float32), np.array([nan, 2.0], np.float32)
    given = rounding(x, "g (float[N] x) => (float[N] y) { e = Exp(x) y = Log(e) }")
    assert compare("y", want, got, given).reason
    assert compare("y", want, got, given, is_extreme=True).decides is False


def test_integers_must_be_equal_unless_rounding_decides() -> None:
    clear = rounding(text="g (float[N] x) => (int64 k) { k = ArgMax<axis=0,keepdims=0>(x) }")
    assert "1 of 1 values differ" in compare("k", np.array(7), np.array(6), clear).reason
    tied = rounding(
        text="g (float[N] x) => (int64 k) { e = Exp(x) l = Log(e) d = Sub(l, x) k = ArgMax<axis=0,keepdims=0>(d) }"
    )
    found = compare("k", np.array(7), np.array(6), tied)
    assert found.reason == ""
    assert "ties" in found.note


def test_texts_are_compared() -> None:
    want = np.array([b"a", b"b"], object)
    given = rounding()
    assert compare("t", want, want.copy(), given).reason == ""


def test_statistics_leave_out_what_is_not_finite() -> None:
    assert statistics(np.array([1.0, 3.0, nan], np.float32)) == "float32[3] from 1 to 3, mean 2, 1 not finite"
    assert statistics(np.zeros(0, np.float32)) == "float32[0]"


def test_probabilities_may_be_one_minus_the_others() -> None:
    want = np.array([[1.0, 0.0], [0.9998, 0.0002]])
    got = np.array([[1.0, 1e-9], [0.9998, 0.0002 + 1e-8]], np.float32)
    text = "g (float[N] x) => (float[N,2] y) <float[2,2] w = {1.0, 0.0, 0.9998, 0.0002}> { y = Identity(w) }"
    assert compare("y", want.astype(np.float32), got, rounding(text=text)).reason == ""
    far = got + np.float32([[0, 1e-3]])
    assert compare("y", want.astype(np.float32), far, rounding(text=text)).reason


def test_ties_do_not_excuse_many_values() -> None:
    # The scores of half of the rows are lost in rounding, but the source tells them apart.
    text = (
        "g (float[N] x) => (int64[N] k) <int64[1] one = {1}, float c = {100000000.0}> { a = Add(x, c) b = Sub(a, c) "
        "u = Unsqueeze(b, one) v = Neg(u) s = Concat<axis=1>(u, v) k = ArgMax<axis=1,keepdims=0>(s) }"
    )
    x = np.float32([-1, 1, -1, 1, -100, 100, -100, 100])
    right = (x < 0).astype(np.int64)
    found = compare("k", right, 1 - right, rounding(x, text))
    assert "8 of 8 values differ" in found.reason or not found.decides
    one = right.copy()
    one[0] = 1 - one[0]
    assert compare("k", right, one, rounding(x, text), is_extreme=True).reason == ""


def test_ties_that_the_call_makes_are_excused() -> None:
    text = "g (float[N] x) => (int64[M] i) <int64[1] k = {4}> { v, i = TopK(x, k) }"
    model = rounding(np.float32([1, 1, 1, 5, 0]), text)
    want, other_order, other_best = np.int64([3, 0, 1, 2]), np.int64([3, 2, 1, 0]), np.int64([0, 3, 1, 2])
    assert compare("i", want, other_order, model, has_ties=True).reason == ""
    assert "2 of 4 values differ" in compare("i", want, other_order, model).reason
    assert "2 of 4 values differ" in compare("i", want, other_best, model, has_ties=True).reason


def test_empty_tensors_decide_nothing() -> None:
    empty = np.empty((0, 4), np.float32)
    assert not compare("y", empty, empty, rounding()).decides
    assert not compare("y", empty.astype(np.int64), empty.astype(np.int64), rounding()).decides
