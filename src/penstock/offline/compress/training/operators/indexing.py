"""Operators that select elements by index, by rank or by condition. Indices may be negative."""

from __future__ import annotations

from penstock.offline.compress.training.operators.registry import Node, ints, operator, table
from penstock.offline.compress.training.torch import Tensor, torch

table({"GatherElements": lambda x, indices, *, axis=0: torch.gather(x, axis, _wrapped(indices, x.shape[axis]))})
table({"NonZero": lambda x: torch.nonzero(x).T}, fixed=None)


@operator("Gather")
def gather(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    axis = node.get("axis", 0) % x.ndim
    at = _wrapped(indices, x.shape[axis])
    return x.index_select(axis, at.reshape(-1)).reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


@operator("GatherND")
def gather_nd(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    batch, depth = node.get("batch_dims", 0), indices.shape[-1]
    at = [_wrapped(indices[..., axis], x.shape[batch + axis]) for axis in range(depth)]
    grid = [
        torch.arange(x.shape[axis]).reshape([-1 if d == axis else 1 for d in range(indices.ndim - 1)])
        for axis in range(batch)
    ]
    return x[(*grid, *at)]


@operator("ScatterND")
def scatter_nd(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    if node.get("reduction", "none") not in ("none", "add"):
        raise node.unsupported(f"a reduction by '{node.get('reduction')}'")
    at = tuple(_wrapped(indices[..., axis], x.shape[axis]) for axis in range(indices.shape[-1]))
    return x.index_put(at, updates, accumulate=node.get("reduction", "none") == "add")


@operator("OneHot", fixed=None)
def one_hot(node: Node, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    """If an index is out of range, its row contains only the off-value."""
    (classes,) = ints(depth)
    axis = node.get("axis", -1)
    at = indices.to(torch.int64)
    at = torch.where(at < 0, at + classes, at).unsqueeze(axis)
    shape = [1] * at.ndim
    shape[axis] = classes
    return torch.where(at == torch.arange(classes).reshape(shape), values[1], values[0])


@operator("TopK")
def top_k(node: Node, x: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """On a tie, the lower index comes first. ONNX requires this order, but ``torch.topk`` does not guarantee it."""
    count, axis = (node.get("k") if k is None else int(k)), node.get("axis", -1)
    order = torch.sort(x, dim=axis, descending=bool(node.get("largest", 1)), stable=True)
    return order.values.narrow(axis, 0, count), order.indices.narrow(axis, 0, count)


@operator("CumSum")
def cum_sum(node: Node, x: Tensor, axis: Tensor) -> Tensor:
    (along,) = ints(axis)
    x = x.flip(along) if node.get("reverse", 0) else x
    sums = torch.cumsum(x, along, dtype=x.dtype)
    sums = sums - x if node.get("exclusive", 0) else sums
    return sums.flip(along) if node.get("reverse", 0) else sums


@operator("ArrayFeatureExtractor", domain="ai.onnx.ml")
def array_feature_extractor(_node: Node, x: Tensor, indices: Tensor) -> Tensor:
    rows = x if x.ndim > 1 else x[None]
    return rows.index_select(-1, indices.reshape(-1))


def _wrapped(indices: Tensor, length: int) -> Tensor:
    at = indices.to(torch.int64)
    return torch.where(at < 0, at + length, at)
