"""Activation functions, Softmax among them."""

from __future__ import annotations

from collections.abc import Callable

from penstock.offline.compress.training.operators.registry import Node, operator, table
from penstock.offline.compress.training.torch import Tensor, functional, torch

table(
    {
        "HardSwish": functional.hardswish,
        "Mish": functional.mish,
        "Relu": functional.relu,
        "Sigmoid": torch.sigmoid,
        "Softsign": functional.softsign,
        "Tanh": torch.tanh,
    }
)


@operator("Softplus")
def softplus(_node: Node, x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


@operator("LeakyRelu")
def leaky_relu(node: Node, x: Tensor) -> Tensor:
    return functional.leaky_relu(x, node.get("alpha", 0.01))


@operator("PRelu", weights=(1,))
def prelu(_node: Node, x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


@operator("Elu")
def elu(node: Node, x: Tensor) -> Tensor:
    return functional.elu(x, node.get("alpha", 1.0))


@operator("Selu")
def selu(node: Node, x: Tensor) -> Tensor:
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return functional.elu(x, alpha) * gamma


@operator("HardSigmoid")
def hard_sigmoid(node: Node, x: Tensor) -> Tensor:
    return torch.clamp(x * node.get("alpha", 0.2) + node.get("beta", 0.5), 0, 1)


@operator("Gelu")
def gelu(node: Node, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate=node.get("approximate", "none"))


@operator("Softmax")
def softmax(node: Node, x: Tensor) -> Tensor:
    return _over_axis(node, x, functional.softmax)


@operator("LogSoftmax")
def log_softmax(node: Node, x: Tensor) -> Tensor:
    return _over_axis(node, x, functional.log_softmax)


def _over_axis(node: Node, x: Tensor, function: Callable[..., Tensor]) -> Tensor:
    """Along ``axis``; before opset 13 over all axes from ``axis`` on, together."""
    if node.opset >= 13:
        return function(x, dim=node.get("axis", -1))
    axis = node.get("axis", 1) % x.ndim
    return function(x.flatten(axis), dim=axis).reshape(x.shape)
