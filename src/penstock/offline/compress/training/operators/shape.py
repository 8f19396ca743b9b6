"""Operators that move elements, and operators that compute shapes (int64)."""

from __future__ import annotations

import math

from penstock.offline.compress.training.operators.registry import Node, ints, operator, table
from penstock.offline.compress.training.torch import Tensor, functional, torch

table(
    {
        "Concat": lambda *parts, axis=1: torch.cat(parts, dim=axis),
        "Expand": lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, ints(shape))),
        "Flatten": lambda x, *, axis=1: x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])),
        "Identity": lambda x: x,
        "Tile": lambda x, repeats: x.repeat(*ints(repeats)) if x.ndim else x,
        "Transpose": lambda x, *, perm=None: x.permute(*(perm or reversed(range(x.ndim)))),
        "Trilu": lambda x, k=None, *, upper=1: (torch.triu if upper else torch.tril)(x, 0 if k is None else int(k)),
    }
)
table(
    {
        "ConstantOfShape": lambda shape, *, value=None: (
            (torch.zeros(1) if value is None else torch.from_numpy(value.copy()))
            .reshape(())
            .expand(ints(shape))
            .clone()
        ),
        "Range": lambda start, limit, delta: (
            start + delta * torch.arange(max(0, int(torch.ceil((limit - start) / delta))), dtype=start.dtype)
        ),
        "Shape": lambda x, *, start=0, end=None: torch.tensor(list(x.shape)[start:end], dtype=torch.int64),
        "Size": lambda x: torch.tensor(x.numel(), dtype=torch.int64),
    },
    fixed=None,
)


@operator("Dropout", fixed=(1,))
def dropout(node: Node, x: Tensor, *_ratio_and_mode: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """Dropout is the identity, as in inference."""
    return x if len(node.outputs) == 1 else (x, torch.ones_like(x, dtype=torch.bool))


@operator("Reshape")
def reshape(node: Node, x: Tensor, shape: Tensor) -> Tensor:
    wanted = ints(shape)
    if not node.get("allowzero", 0):
        wanted = [x.shape[axis] if length == 0 else length for axis, length in enumerate(wanted)]
    return x.reshape(wanted)


@operator("Squeeze")
def squeeze(node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = node.ints("axes", axes)
    return x.squeeze() if chosen is None else x.squeeze(tuple(chosen))


@operator("Unsqueeze")
def unsqueeze(node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = node.ints("axes", axes) or []
    rank = x.ndim + len(chosen)
    for axis in sorted(axis % rank for axis in chosen):
        x = x.unsqueeze(axis)
    return x


@operator("Slice")
def slice_(
    node: Node,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    first, last, chosen = node.ints("starts", starts) or [], node.ints("ends", ends) or [], node.ints("axes", axes)
    chosen = list(range(len(first))) if chosen is None else chosen
    stride = [1] * len(first) if steps is None else ints(steps)
    for axis, start, end, step in zip(chosen, first, last, stride, strict=True):
        size = x.shape[axis]
        if step > 0:
            x = x[(slice(None),) * (axis % x.ndim) + (slice(*slice(start, end, step).indices(size)),)]
        else:
            # A start before the first position means the first position; ``slice.indices`` alone would return -1.
            bounds = slice(max(start, -size), end, step).indices(size)
            x = x.index_select(axis, torch.tensor(list(range(*bounds)), dtype=torch.int64))
    return x


@operator("Split")
def split(node: Node, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
    axis, count = node.get("axis", 0), len(node.outputs)
    # Without lengths, all parts are equal except the last part, which may be shorter.
    chosen = node.ints("split", lengths) or -(-x.shape[axis] // count)
    return tuple(torch.split(x, chosen, dim=axis))


@operator("Pad", fixed=(2,))
def pad(
    node: Node, x: Tensor, pads: Tensor | None = None, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    sizes = node.ints("pads", pads) or []
    chosen = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in ints(axes)]
    fill = node.get("value", 0.0) if value is None else value.item()
    mode = node.get("mode", "constant")
    for position, axis in enumerate(chosen):
        before, behind = sizes[position], sizes[position + len(chosen)]
        if mode == "constant":
            pairs = [0, 0] * (x.ndim - 1 - axis) + [before, behind]
            x = functional.pad(x, pairs, value=fill)
        elif before or behind:
            x = x.index_select(axis, _padded_positions(node, mode, x.shape[axis], before, behind))
    return x


def _padded_positions(node: Node, mode: str, length: int, before: int, behind: int) -> Tensor:
    """For each position of a padded axis, the index of its source element. ``length`` is the size before padding."""
    at = torch.arange(-before, length + behind)
    if mode == "edge":
        return at.clamp(0, length - 1)
    if mode == "wrap":
        return at % length
    if mode == "reflect":
        period = max(1, 2 * (length - 1))
        folded = at.abs() % period
        return torch.minimum(folded, period - folded)
    raise node.unsupported(f"padding of mode '{mode}'")


@operator("DepthToSpace")
def depth_to_space(node: Node, x: Tensor) -> Tensor:
    block, (n, c, h, w) = node.get("blocksize"), x.shape
    if node.get("mode", "DCR") == "DCR":
        parts = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, c // block**2, block, block, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, c // block**2, h * block, w * block)


@operator("SpaceToDepth")
def space_to_depth(node: Node, x: Tensor) -> Tensor:
    block, (n, c, h, w) = node.get("blocksize"), x.shape
    parts = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * block**2, h // block, w // block)
