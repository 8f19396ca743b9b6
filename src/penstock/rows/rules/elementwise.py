"""Rules for operators that compute each element from the input elements at the same position, and for arithmetic with sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from penstock.rows import sizes
from penstock.rows.call import MICROSOFT, Call, Facts, keeps_shape, rule
from penstock.rows.facts import MAX_KNOWN, Fact, broadcast, stop
from penstock.rows.sizes import Number
from penstock.tensor import Array

_UNARY = """Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity
IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh
ThresholdedRelu Cast RegexFullMatch"""
_SEVERAL = """Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul
Or PRelu Pow StringConcat Sub Sum SwiGLU Where Xor Clip"""
_INT32, _INT64, _FLOAT, _DOUBLE, _BOOL = 6, 7, 1, 11, 9


def _not_equal(first: Number, second: Number) -> Number:
    return _not(sizes.equal(first, second))


def _not(first: Number) -> Number:
    return sizes.result("not", first) if isinstance(first, sizes.Size) else int(not first)


_FOLDED: dict[str, Callable[..., Number]] = {
    "Identity": lambda one: one,
    "Neg": lambda one: sizes.times(-1, one),
    "Floor": sizes.rounded,
    "Ceil": lambda one: sizes.rounded(one, math.ceil),
    "Not": _not,
    "Add": sizes.plus,
    "Sum": sizes.plus,
    "Sub": sizes.minus,
    "Mul": sizes.times,
    "Div": sizes.divide,
    "Min": sizes.extreme(min),
    "Max": sizes.extreme(max),
    "Equal": sizes.equal,
    "Greater": sizes.compare(">", operator.gt),
    "GreaterOrEqual": sizes.compare(">=", operator.ge),
    "Less": sizes.compare("<", operator.lt),
    "LessOrEqual": sizes.compare("<=", operator.le),
    "And": sizes.compare("and", lambda one, other: bool(one and other)),
    "Or": sizes.compare("or", lambda one, other: bool(one or other)),
    "Where": sizes.choose,
}
_CASTS: dict[int, Callable[[Number], Number]] = {
    _INT32: lambda one: sizes.to_integer(one, 32),
    _INT64: sizes.to_integer,
    _FLOAT: sizes.to_float,
    _DOUBLE: lambda one: sizes.to_float(one, 64),
    _BOOL: lambda one: _not_equal(one, 0),
}


def fold(function: Callable[..., Number], *values: Array) -> Array:
    """Broadcast ``values`` and apply ``function`` to each tuple of elements."""
    if len(values) > 2 and function is not sizes.choose:
        return reduce(lambda one, other: fold(function, one, other), values)
    return np.asarray(
        np.frompyfunc(lambda *numbers: sizes.bounded(function(*numbers)), len(values), 1)(*values), object
    )


@rule(*_UNARY.split(), *_SEVERAL.split())
def elementwise(call: Call) -> Fact:
    facts = [fact for fact in call.inputs if fact is not None]
    if not facts:
        stop("has no input")
    shape = broadcast(*(fact.shape for fact in facts))
    function: Any = _FOLDED.get(call.operator)
    if call.operator == "Cast":
        function = _CASTS.get(call.attribute("to", 0))
    elif call.operator == "Mod" and not call.attribute("fmod", 0):
        function = sizes.modulo
    if function is None or not all(isinstance(size, int) for size in shape) or math.prod(shape) > MAX_KNOWN:
        return Fact(shape)
    values = [value for fact in facts if (value := fact.value) is not None]
    return Fact(shape, fold(function, *values) if len(values) == len(facts) else None)


@rule("BiasGelu", "FastGelu", "Gelu", "QuickGelu", domain=MICROSOFT)
def fused(call: Call) -> Fact:
    return Fact(broadcast(*(fact.shape for fact in call.inputs if fact is not None)))


@rule("CastLike")
def cast_like(call: Call) -> Fact:
    call.accounted.add(1)
    return Fact(call[0].shape)


@rule("Dropout")
def dropout(call: Call) -> Facts:
    if call.get(2) is not None and call.numbers(2) != [0]:
        stop("is in training mode")
    return [call[0], Fact(call[0].shape)]


@rule("QuantizeLinear", "DequantizeLinear")
@rule("QuantizeLinear", "DequantizeLinear", domain=MICROSOFT)
def quantized(call: Call) -> Fact:
    """Quantisation with one scale, or with several scales that are the same for every row."""
    x = call[0]
    call.constants(1, 2)
    for parameter in (fact for fact in call.inputs[1:3] if fact is not None and not fact.is_single):
        if parameter.rank == 1:
            call.mixes(x, call.attribute("axis", 1))
        elif x.is_rows and (parameter.rank != x.rank or parameter.shape[x.axis] != 1):
            stop("has a scale for each row")
    return Fact(x.shape)


@rule("QLinearAdd", "QLinearMul", domain=MICROSOFT)
def quantized_pair(call: Call) -> Fact:
    call.singles(1, 2, 4, 5, 6, 7)
    return Fact(broadcast(call[0].shape, call[3].shape))


keeps_shape("QLinearSigmoid", "QLinearLeakyRelu", singles=(1, 2, 3, 4), domain=MICROSOFT)


@rule("DynamicQuantizeLinear")
def dynamic(call: Call) -> Facts:
    if call[0].is_rows:
        stop("computes its scale from all rows of a batch")
    return [Fact(call[0].shape), Fact(()), Fact(())]
