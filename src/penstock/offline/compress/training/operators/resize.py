"""Resize: each axis in turn, as a weighted sum of a few source elements."""

from __future__ import annotations

from typing import NamedTuple

from penstock.offline.compress.training.operators.registry import Node, ints, operator
from penstock.offline.compress.training.torch import Tensor, torch


class _Rule(NamedTuple):
    """How places of the result map to places of the source."""

    mode: str
    coordinates: str
    nearest: str


@operator("Resize", fixed=(1, 2))
def resize(
    node: Node, x: Tensor, roi: Tensor | None = None, scales: Tensor | None = None, sizes: Tensor | None = None
) -> Tensor:
    if node.opset < 11:
        scales = roi
    if node.get("antialias", 0) or node.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise node.unsupported("a Resize with antialias or with the aspect ratio kept")
    axes = [axis % x.ndim for axis in node.get("axes") or range(x.ndim)]
    lengths, factors = list(x.shape), [1.0] * x.ndim
    if sizes is not None and sizes.numel():
        for axis, length in zip(axes, ints(sizes), strict=True):
            lengths[axis], factors[axis] = length, length / x.shape[axis]
    elif scales is not None:
        for axis, factor in zip(axes, scales.tolist(), strict=True):
            lengths[axis], factors[axis] = int(x.shape[axis] * factor), factor
    coordinates = "asymmetric" if node.opset < 11 else node.get("coordinate_transformation_mode", "half_pixel")
    nearest = "old" if node.opset < 11 else node.get("nearest_mode", "round_prefer_floor")
    return _resize(node, x, lengths, factors, _Rule(node.get("mode", "nearest"), coordinates, nearest))


def _resize(node: Node, x: Tensor, lengths: list[int], factors: list[float], rule: _Rule) -> Tensor:
    for axis, (length, factor) in enumerate(zip(lengths, factors, strict=True)):
        source = x.shape[axis]
        if length == source and factor == 1:
            continue
        places = _places(node, rule.coordinates, source, length, factor)
        view = [-1 if d == axis else 1 for d in range(x.ndim)]
        if rule.mode == "nearest":
            # Before opset 11 ONNX Runtime takes the next element when it shrinks an axis, the last when it grows one.
            nearest = rule.nearest if rule.nearest != "old" else "ceil" if factor < 1 else "floor"
            x = x.index_select(axis, _nearest(nearest, places).clamp(0, source - 1))
        elif rule.mode in ("linear", "bilinear", "trilinear"):
            below = torch.floor(places)
            share = (places - below).to(x.dtype).reshape(view)
            low, high = (x.index_select(axis, at.long().clamp(0, source - 1)) for at in (below, below + 1))
            x = low * (1 - share) + high * share
        else:
            raise node.unsupported(f"a Resize of mode '{rule.mode}'")
    return x


def _places(node: Node, coordinates: str, source: int, length: int, factor: float) -> Tensor:
    """For each element of the result, its place in the source; FP32 as in ONNX Runtime, which decides ties."""
    at = torch.arange(length, dtype=torch.float32)
    if coordinates == "asymmetric":
        return at / factor
    if coordinates == "align_corners":
        return at * ((source - 1) / (length - 1)) if length > 1 else torch.zeros_like(at)
    if coordinates == "pytorch_half_pixel" and length == 1:
        return torch.zeros_like(at)
    if coordinates in ("half_pixel", "pytorch_half_pixel"):
        return (at + 0.5) / factor - 0.5
    if coordinates == "half_pixel_symmetric":
        adjustment = length / (factor * source)
        return source / 2 * (1 - adjustment) + (at + 0.5) / factor - 0.5
    raise node.unsupported(f"a Resize with coordinates '{coordinates}'")


def _nearest(mode: str, places: Tensor) -> Tensor:
    rounded = {
        "floor": torch.floor(places),
        "ceil": torch.ceil(places),
        "round_prefer_floor": torch.ceil(places - 0.5),
        "round_prefer_ceil": torch.floor(places + 0.5),
    }[mode]
    return rounded.long()
