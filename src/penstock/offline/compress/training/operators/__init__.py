"""ONNX operators in torch, differentiable where mathematics allows it; each family registers itself in ``OPERATORS``."""

from __future__ import annotations

from penstock.offline.compress.training.operators import (
    activation,
    elementwise,
    indexing,
    linear,
    normalisation,
    pooling,
    quantization,
    reduction,
    resize,
    shape,
)
from penstock.offline.compress.training.operators.registry import OPERATORS, Node, Norms

__all__ = [
    "OPERATORS",
    "Node",
    "Norms",
    "activation",
    "elementwise",
    "indexing",
    "linear",
    "normalisation",
    "pooling",
    "quantization",
    "reduction",
    "resize",
    "shape",
]
