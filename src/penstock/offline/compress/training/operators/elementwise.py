"""Arithmetic, comparison and logic, element by element, with numpy's broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from onnx import TensorProto

from penstock.offline.compress.training.operators.registry import Node, operator, table
from penstock.offline.compress.training.torch import Tensor, torch

DTYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.INT16: torch.int16,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.UINT16: torch.uint16,
    TensorProto.BOOL: torch.bool,
}
"""The torch type of each ONNX type that can be held."""


def type_name(kind: int) -> str:
    """ONNX's name of a type; its number if there is none."""
    return next((name for name, number in TensorProto.DataType.items() if number == kind), str(kind))


table(
    {
        "Abs": torch.abs,
        "Acos": torch.acos,
        "Add": torch.add,
        "Asin": torch.asin,
        "Atan": torch.atan,
        "Cos": torch.cos,
        "Cosh": torch.cosh,
        "Erf": torch.erf,
        "Exp": torch.exp,
        "Log": torch.log,
        "Mul": torch.mul,
        "Neg": torch.neg,
        "Reciprocal": torch.reciprocal,
        "Sin": torch.sin,
        "Sinh": torch.sinh,
        "Sqrt": torch.sqrt,
        "Sub": torch.sub,
        "Tan": torch.tan,
        "Where": torch.where,
    }
)
# Their derivative is zero or does not exist.
table(
    {
        "And": torch.logical_and,
        "Ceil": torch.ceil,
        "Equal": torch.eq,
        "Floor": torch.floor,
        "Greater": torch.gt,
        "GreaterOrEqual": torch.ge,
        "IsNaN": torch.isnan,
        "Less": torch.lt,
        "LessOrEqual": torch.le,
        "Not": torch.logical_not,
        "Or": torch.logical_or,
        "Round": torch.round,
        "Sign": torch.sign,
        "Xor": torch.logical_xor,
    },
    fixed=None,
)


@operator("Div")
def div(_node: Node, x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


@operator("Pow", fixed=(1,))
def power(_node: Node, x: Tensor, y: Tensor) -> Tensor:
    return torch.pow(x, y).to(x.dtype)


@operator("Mod", fixed=None)
def mod(node: Node, x: Tensor, y: Tensor) -> Tensor:
    return torch.fmod(x, y) if node.get("fmod", 0) else torch.remainder(x, y)


@operator("Clip", fixed=(1, 2))
def clip(node: Node, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if node.opset < 11:
        return torch.clamp(x, node.get("min", -torch.inf), node.get("max", torch.inf))
    return x if low is None and high is None else torch.clamp(x, low, high)


@operator("IsInf", fixed=None)
def is_inf(node: Node, x: Tensor) -> Tensor:
    none = torch.zeros_like(x, dtype=torch.bool)
    above = torch.isposinf(x) if node.get("detect_positive", 1) else none
    below = torch.isneginf(x) if node.get("detect_negative", 1) else none
    return above | below


@operator("Cast", "CastLike")
def cast(node: Node, x: Tensor, like: Tensor | None = None) -> Tensor:
    if like is not None:
        return x.to(like.dtype)
    if node.get("to") not in DTYPES:
        raise node.unsupported(f"a cast to {type_name(node.get('to'))}")
    return x.to(DTYPES[node.get("to")])


def _variadic(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    operator(name)(lambda _node, *inputs: reduce(function, inputs))


_variadic("Max", torch.maximum)
_variadic("Min", torch.minimum)
_variadic("Sum", torch.add)


@operator("Mean")
def mean(_node: Node, *inputs: Tensor) -> Tensor:
    return reduce(torch.add, inputs) / len(inputs)
