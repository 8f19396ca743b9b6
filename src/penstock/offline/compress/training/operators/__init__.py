"""ONNX operators in torch, differentiable wherever possible. Each family registers itself in ``OPERATORS``."""

from importlib import import_module

from penstock.offline.compress.training.operators.registry import OPERATORS, Node

__all__ = ["OPERATORS", "Node"]

_FAMILIES = ["elementwise", "indexing", "linear", "normalisation", "pooling", "quantization", "reduction", "resize"]
for _family in [*_FAMILIES, "shape"]:
    import_module(f"{__name__}.{_family}")
