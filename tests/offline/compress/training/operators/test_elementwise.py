from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from one_node import Const, agree, floats

_ANY = floats(3, 4)
_POSITIVE = floats(3, 4, low=0.1)
_UNIT = floats(3, 4, low=-0.9, high=0.9)
_INTS = np.array([[-7, 7, 5], [-5, 0, 9]], np.int64)
_ODD = np.array([0.5, 1.5, 2.5, -0.5, -1.5, np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
_TRUE = np.array([True, True, False, False])
_MIXED = np.array([True, False, True, False])


@pytest.mark.parametrize(
    "op_type",
    ["Abs", "Atan", "Cos", "Erf", "Exp", "Neg", "Sin", "Tan", "Sinh", "Cosh", "Sign", "Floor", "Ceil", "Reciprocal"],
)
def test_functions_of_any_number(op_type: str) -> None:
    agree(op_type, _ANY)


@pytest.mark.parametrize("op_type", ["Sqrt", "Log"])
def test_functions_of_positive_numbers(op_type: str) -> None:
    agree(op_type, _POSITIVE)


@pytest.mark.parametrize("op_type", ["Asin", "Acos"])
def test_functions_of_the_unit_interval(op_type: str) -> None:
    agree(op_type, _UNIT)


@pytest.mark.parametrize("op_type", ["Round", "Floor", "Ceil", "Sign", "Abs", "Neg"])
def test_halves_nan_and_infinities(op_type: str) -> None:
    agree(op_type, _ODD if op_type != "Sign" else _ODD[:5])


@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("shape", [(3, 4), (4,), (3, 1), (1,), ()])
def test_arithmetic_broadcasts(op_type: str, shape: tuple[int, ...]) -> None:
    agree(op_type, _ANY, floats(*shape, seed=1, low=0.5))


@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Div"])
def test_arithmetic_of_integers(op_type: str) -> None:
    agree(op_type, _INTS, np.array([2, -2, 4], np.int64), kinds=(TensorProto.INT64,))


@pytest.mark.parametrize(
    "exponent", [np.array(2.0, np.float32), np.array([0.5, 1, 2, 3], np.float32), np.array(2, np.int64)]
)
def test_pow(exponent: np.ndarray) -> None:
    agree("Pow", _POSITIVE, exponent)


def test_pow_of_integers() -> None:
    agree("Pow", _INTS, np.array(2.0, np.float32), kinds=(TensorProto.INT64,))


@pytest.mark.parametrize("fmod", [0, 1])
def test_mod(fmod: int) -> None:
    agree("Mod", _INTS, np.array([3, -3, 4], np.int64), fmod=fmod, kinds=(TensorProto.INT64,))


def test_mod_of_floats() -> None:
    agree("Mod", _ANY, floats(4, seed=1, low=0.5), fmod=1)


@pytest.mark.parametrize(("low", "high"), [(None, None), (-0.5, None), (None, 0.5), (-0.5, 0.5)])
def test_clip(low: float | None, high: float | None) -> None:
    bounds = [None if value is None else Const(value, np.float32) for value in (low, high)]
    agree("Clip", _ANY, *bounds, opset=13)
    attributes = {key: value for key, value in (("min", low), ("max", high)) if value is not None}
    agree("Clip", _ANY, opset=9, **attributes)


def test_clip_of_integers() -> None:
    agree("Clip", _INTS, Const(-2), Const(5), kinds=(TensorProto.INT64,))


@pytest.mark.parametrize("op_type", ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"])
def test_comparison(op_type: str) -> None:
    agree(op_type, _INTS, np.array([7, 0, 9], np.int64), kinds=(TensorProto.BOOL,))


@pytest.mark.parametrize("op_type", ["And", "Or", "Xor"])
def test_logic(op_type: str) -> None:
    agree(op_type, _TRUE, _MIXED, kinds=(TensorProto.BOOL,))


def test_not() -> None:
    agree("Not", _MIXED, kinds=(TensorProto.BOOL,))


def test_nan_and_infinity() -> None:
    agree("IsNaN", _ODD, kinds=(TensorProto.BOOL,))
    for attributes in ({}, {"detect_negative": 0}, {"detect_positive": 0}):
        agree("IsInf", _ODD, kinds=(TensorProto.BOOL,), **attributes)


def test_where() -> None:
    agree("Where", _MIXED, _ANY, floats(3, 1, seed=1))


@pytest.mark.parametrize("op_type", ["Max", "Min", "Sum", "Mean"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_variadic(op_type: str, count: int) -> None:
    agree(op_type, *[floats(3, 4, seed=1), floats(4, seed=2), floats(3, 1, seed=3)][:count])


@pytest.mark.parametrize("to", ["FLOAT", "INT64", "INT32", "BOOL", "FLOAT16", "DOUBLE"])
@pytest.mark.parametrize("x", [_ANY, _INTS, _MIXED], ids=["float", "int", "bool"])
def test_cast(to: str, x: np.ndarray) -> None:
    kind = TensorProto.DataType.Value(to)
    agree("Cast", x, to=kind, kinds=(kind,))


def test_cast_like() -> None:
    agree("CastLike", _INTS, _ANY, opset=15)


@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("Relu", {}),
        ("Sigmoid", {}),
        ("Tanh", {}),
        ("Softsign", {}),
        ("Softplus", {}),
        ("HardSwish", {}),
        ("Mish", {}),
        ("LeakyRelu", {}),
        ("LeakyRelu", {"alpha": 0.3}),
        ("Elu", {"alpha": 1.5}),
        ("Selu", {}),
        ("Selu", {"alpha": 1.1, "gamma": 2.0}),
        ("HardSigmoid", {}),
        ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}),
    ],
)
def test_activation(op_type: str, attributes: dict[str, Any]) -> None:
    agree(op_type, 3 * _ANY, **attributes)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str) -> None:
    agree("Gelu", 3 * _ANY, approximate=approximate, opset=20)


@pytest.mark.parametrize("shape", [(1,), (3, 1, 1), (3, 4, 5)])
def test_prelu(shape: tuple[int, ...]) -> None:
    agree("PRelu", floats(2, 3, 4, 5), Const(floats(*shape, seed=1), np.float32))
