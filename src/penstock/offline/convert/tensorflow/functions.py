"""ONNX functions for operators of TensorFlow that tf2onnx lacks.

``Log1p`` and ``Expm1`` stay accurate near 0: the rounding errors of ``1 + x`` and ``exp(x)`` cancel in Kahan's formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx
import onnx.inliner
import onnx.parser

from penstock.offline.convert.repairs.graphs import nodes_below

DOMAIN = "penstock.tensorflow"
_BODIES = {
    "Erfc": "(x) => (z) { e = Erf(x)  z = Sub(one, e) }",
    "GeluErf": """(x) => (z) {
        s = Mul(x, inverse_root_two)
        e = Erf(s)
        w = Add(one, e)
        h = Mul(half, x)
        z = Mul(h, w)
    }""",
    "GeluTanh": """(x) => (z) {
        q = Mul(x, x)
        c = Mul(q, x)
        t = Mul(c, cubic)
        p = Add(x, t)
        s = Mul(p, root_two_over_pi)
        n = Tanh(s)
        w = Add(one, n)
        h = Mul(half, x)
        z = Mul(h, w)
    }""",
    "Expm1": """(x) => (z) {
        u = Exp(x)
        direct = Sub(u, one)
        l = Log(u)
        p = Mul(direct, x)
        q = Div(p, l)
        is_one = Equal(u, one)
        near = Where(is_one, x, q)
        a = Abs(x)
        is_far = Greater(a, half)
        z = Where(is_far, direct, near)
    }""",
    "L2Loss": "(x) => (z) { s = Mul(x, x)  t = ReduceSum<keepdims = 0>(s)  z = Mul(t, half) }",
    "Log1p": """(x) => (z) {
        u = Add(one, x)
        l = Log(u)
        d = Sub(u, one)
        q = Div(x, d)
        is_exact = Equal(x, d)
        ratio = Where(is_exact, one, q)
        far = Mul(l, ratio)
        is_one = Equal(u, one)
        z = Where(is_one, x, far)
    }""",
    "MulNoNan": "(x, y) => (z) { p = Mul(x, y)  is_zero = Equal(y, zero)  z = Where(is_zero, zero, p) }",
    "QuantisedRows": """(x) => (z) {
        last = Constant<value_ints = [-1]>()
        least = ReduceMin(x, last)
        low = Min(least, zero)
        most = ReduceMax(x, last)
        high = Max(most, zero)
        range = Sub(high, low)
        scale = Div(range, steps)
        offset = Div(low, scale)
        from_start = Sub(start, offset)
        point = Round(from_start)
        scaled = Div(x, scale)
        moved = Add(scaled, point)
        rounded = Round(moved)
        clipped = Clip(rounded, start, end)
        centred = Sub(clipped, point)
        restored = Mul(centred, scale)
        is_zero = Equal(range, zero)
        z = Where(is_zero, x, restored)
    }""",
    "TruncateMod": "(x, y) => (z) { z = Mod<fmod = 1>(x, y) }",
    "Xdivy": "(x, y) => (z) { q = Div(x, y)  is_zero = Equal(x, zero)  z = Where(is_zero, zero, q) }",
    "Xlogy": "(x, y) => (z) { l = Log(y)  p = Mul(x, l)  is_zero = Equal(x, zero)  z = Where(is_zero, zero, p) }",
}
_BODIES["QuantisedImages"] = _BODIES["QuantisedRows"].replace("[-1]", "[1, 2, 3]")
_CONSTANTS = {
    "cubic": 0.044715,
    "half": 0.5,
    "inverse_root_two": math.sqrt(0.5),
    "one": 1.0,
    "root_two_over_pi": math.sqrt(2.0 / math.pi),
    "start": -128.0,
    "end": 127.0,
    "steps": 255.0,
    "zero": 0.0,
}
OPERATORS = frozenset(_BODIES) - {"GeluErf", "GeluTanh", "QuantisedRows", "QuantisedImages"} | {"TFL_GELU"}
"""The operators that ``function_of`` gives a function."""


def function_of(operator: str, attributes: Mapping[str, Any]) -> str:
    """The name of the function that computes ``operator``."""
    if operator == "TFL_GELU":
        return "GeluTanh" if attributes["approximate"].i else "GeluErf"
    return operator


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` with the bodies of the functions that it calls in ``DOMAIN``, which it then no longer needs."""
    called = {node.op_type for node in nodes_below(model.graph) if node.domain == DOMAIN}
    opset = next(one.version for one in model.opset_import if one.domain == "")
    model.functions.extend(_function(name, opset) for name in sorted(called))
    made = onnx.inliner.inline_local_functions(model) if called else model
    kept = [one for one in made.opset_import if one.domain != DOMAIN]
    del made.opset_import[:]
    made.opset_import.extend(kept)
    return made


def _function(name: str, opset: int) -> onnx.FunctionProto:
    head, _, body = _BODIES[name].partition("{")
    constants = "".join(
        f"c_{one} = Constant<value_float = {value}>()  {one} = CastLike(c_{one}, x)  "
        for one, value in _CONSTANTS.items()
        if one in body
    )
    text = f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]> {name} {head} {{ {constants} {body}'
    return onnx.parser.parse_function(text)
