"""Masked attention as torch computes it: a query that may look at no key gives 0.

torch's exporter writes attention without this rule: with a boolean mask, such a query gives the mean of all values, and with a mask of
floats NaN. Padded rows of a batch are such queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def is_masked_attention(node: torch.fx.Node) -> bool:
    """True if ``node`` computes attention with a mask."""
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return node.target == _ATTENTION and mask is not None


def decomposition() -> dict[Any, Callable[..., Any]]:
    """The decomposition of masked attention into attention, and zeros for queries without keys."""
    is_inside = False

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> Any:
        nonlocal is_inside
        mask = rest[0] if rest else named.get("attn_mask")
        if is_inside or mask is None:
            return NotImplemented
        is_inside = True
        try:
            found = _ATTENTION(query, key, value, *rest, **named)
        finally:
            is_inside = False
        allowed = mask if mask.dtype is torch.bool else mask != -torch.inf
        return torch.where(allowed.any(-1, keepdim=True), found, 0)

    return {_ATTENTION: attention}
