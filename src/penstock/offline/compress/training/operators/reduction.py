"""Reductions over axes, which are an attribute in older opsets and an input in newer ones."""

from __future__ import annotations

from collections.abc import Callable

from penstock.offline.compress.training.operators.registry import Node, ints, operator
from penstock.offline.compress.training.torch import Tensor, torch

_Reduce = Callable[[Tensor, list[int], bool], Tensor]


def _reduction(name: str, function: _Reduce) -> None:
    def run(node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen = node.get("axes") if axes is None else ints(axes)
        if not chosen:
            if node.get("noop_with_empty_axes", 0):
                return x
            chosen = list(range(x.ndim))
        return function(x, list(chosen), bool(node.get("keepdims", 1)))

    operator(name)(run)


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


_reduction("ReduceMean", lambda x, axes, keep: torch.mean(x, axes, keepdim=keep))
_reduction("ReduceSum", lambda x, axes, keep: torch.sum(x, axes, keepdim=keep, dtype=x.dtype))
_reduction("ReduceMax", lambda x, axes, keep: torch.amax(x, axes, keepdim=keep))
_reduction("ReduceMin", lambda x, axes, keep: torch.amin(x, axes, keepdim=keep))
_reduction("ReduceL1", lambda x, axes, keep: torch.sum(x.abs(), axes, keepdim=keep))
_reduction("ReduceL2", lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keepdim=keep))
_reduction("ReduceSumSquare", lambda x, axes, keep: torch.sum(x * x, axes, keepdim=keep))
_reduction("ReduceLogSum", lambda x, axes, keep: torch.log(torch.sum(x, axes, keepdim=keep)))
_reduction("ReduceLogSumExp", lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep))
_reduction("ReduceProd", _product)
