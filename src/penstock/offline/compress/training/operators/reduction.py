"""Operators along axes: reductions, Softmax, ArgMax."""

from __future__ import annotations

from collections.abc import Callable

from penstock.offline.compress.training.operators.registry import Node, table
from penstock.offline.compress.training.torch import Tensor, functional, torch


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


def _reduce(function: Callable[..., Tensor], node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = node.ints("axes", axes)
    if not chosen and node.get("noop_with_empty_axes", 0):
        return x
    return function(x, list(chosen or range(x.ndim)), bool(node.get("keepdims", 1)))


table(
    {
        "ReduceL1": lambda x, axes, keep: torch.sum(x.abs(), axes, keepdim=keep),
        "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keepdim=keep),
        "ReduceLogSum": lambda x, axes, keep: torch.log(torch.sum(x, axes, keepdim=keep)),
        "ReduceLogSumExp": torch.logsumexp,
        "ReduceMax": torch.amax,
        "ReduceMean": torch.mean,
        "ReduceMin": torch.amin,
        "ReduceProd": _product,
        "ReduceSum": lambda x, axes, keep: torch.sum(x, axes, keepdim=keep, dtype=x.dtype),
        "ReduceSumSquare": lambda x, axes, keep: torch.sum(x * x, axes, keepdim=keep),
    },
    _reduce,
)


def _over_axis(function: Callable[..., Tensor], node: Node, x: Tensor) -> Tensor:
    """Apply ``function`` along ``axis``; before opset 13, over all axes from ``axis`` on together."""
    if node.opset >= 13:
        return function(x, dim=node.get("axis", -1))
    axis = node.get("axis", 1) % x.ndim
    return function(x.flatten(axis), dim=axis).reshape(x.shape)


table({"LogSoftmax": functional.log_softmax, "Softmax": functional.softmax}, _over_axis)


def _first_or_last(function: Callable[..., Tensor], node: Node, x: Tensor) -> Tensor:
    axis, keep = node.get("axis", 0), bool(node.get("keepdims", 1))
    if node.get("select_last_index", 0):
        return x.shape[axis] - 1 - function(x.flip(axis), dim=axis, keepdim=keep)
    return function(x, dim=axis, keepdim=keep)


table({"ArgMax": torch.argmax, "ArgMin": torch.argmin}, _first_or_last, fixed=None)
