"""Elementwise arithmetic, comparison, logic and activations, with numpy's broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from onnx import TensorProto

from penstock.offline.compress.training.operators.registry import Node, operator, table
from penstock.offline.compress.training.torch import Tensor, functional, torch

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
"""The torch type of each supported ONNX type."""


def type_name(kind: int) -> str:
    """The ONNX name of a type, or its number if it has no name."""
    return str(TensorProto.DataType.Name(kind)) if kind in TensorProto.DataType.values() else str(kind)


_SAME_NAME = "Abs Acos Add Asin Atan Cos Cosh Erf Exp Log Mul Neg Reciprocal Sigmoid Sin Sinh Sqrt Sub Tan Tanh Where"
_SAME_NAME_IN_FUNCTIONAL = "HardSwish Mish Relu Softsign"
_SAME_NAME_FIXED = "Ceil Floor IsNaN Round Sign"
"""Operators whose derivative is zero or does not exist."""

table({name: getattr(torch, name.lower()) for name in _SAME_NAME.split()})
table({name: getattr(functional, name.lower()) for name in _SAME_NAME_IN_FUNCTIONAL.split()})
table({name: getattr(torch, name.lower()) for name in _SAME_NAME_FIXED.split()}, fixed=None)
table(
    {
        "Div": lambda x, y: x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc"),
        "Elu": lambda x, *, alpha=1.0: functional.elu(x, alpha),
        "Gelu": lambda x, *, approximate="none": functional.gelu(x, approximate=approximate),
        "HardSigmoid": lambda x, *, alpha=0.2, beta=0.5: torch.clamp(x * alpha + beta, 0, 1),
        "LeakyRelu": lambda x, *, alpha=0.01: functional.leaky_relu(x, alpha),
        "Mean": lambda *inputs: reduce(torch.add, inputs) / len(inputs),
        "Selu": lambda x, *, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875: (
            functional.elu(x, alpha) * gamma
        ),
        "Softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    }
)
table({"Pow": lambda x, y: torch.pow(x, y).to(x.dtype)}, fixed=(1,))
table({"PRelu": lambda x, slope: torch.where(x < 0, x * slope, x)}, weights=(1,))
table(
    {
        "And": torch.logical_and,
        "Equal": torch.eq,
        "Greater": torch.gt,
        "GreaterOrEqual": torch.ge,
        "IsInf": lambda x, *, detect_positive=1, detect_negative=1: (
            (torch.isposinf(x) & bool(detect_positive)) | (torch.isneginf(x) & bool(detect_negative))
        ),
        "Less": torch.lt,
        "LessOrEqual": torch.le,
        "Mod": lambda x, y, *, fmod=0: torch.fmod(x, y) if fmod else torch.remainder(x, y),
        "Not": torch.logical_not,
        "Or": torch.logical_or,
        "Xor": torch.logical_xor,
    },
    fixed=None,
)


def _variadic(function: Callable[[Tensor, Tensor], Tensor], _node: Node, *inputs: Tensor) -> Tensor:
    return reduce(function, inputs)


table({"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add}, _variadic)


@operator("Clip", fixed=(1, 2))
def clip(node: Node, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if node.opset < 11:
        return torch.clamp(x, node.get("min", -torch.inf), node.get("max", torch.inf))
    return x if low is None and high is None else torch.clamp(x, low, high)


@operator("Cast", "CastLike")
def cast(node: Node, x: Tensor, like: Tensor | None = None) -> Tensor:
    if like is not None:
        return x.to(like.dtype)
    if node.get("to") not in DTYPES:
        raise node.unsupported(f"a cast to {type_name(node.get('to'))}")
    return x.to(DTYPES[node.get("to")])
