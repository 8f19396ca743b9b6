"""Resize one axis at a time. Each result element is a weighted sum of source elements."""

from __future__ import annotations

from penstock.offline.compress.training.operators.registry import Node, ints, operator
from penstock.offline.compress.training.torch import Tensor, torch


@operator("Resize", fixed=(1, 2))
def resize(
    node: Node, x: Tensor, roi: Tensor | None = None, scales: Tensor | None = None, sizes: Tensor | None = None
) -> Tensor:
    if node.opset < 11:
        scales = roi
    if node.get("antialias", 0) or node.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise node.unsupported("a Resize with antialias or keep_aspect_ratio_policy")
    axes = [axis % x.ndim for axis in node.get("axes") or range(x.ndim)]
    lengths, factors = list(x.shape), [1.0] * x.ndim
    if sizes is not None and sizes.numel():
        for axis, length in zip(axes, ints(sizes), strict=True):
            lengths[axis], factors[axis] = length, length / x.shape[axis]
    elif scales is not None:
        for axis, factor in zip(axes, scales.tolist(), strict=True):
            lengths[axis], factors[axis] = int(x.shape[axis] * factor), factor
    for axis, (length, factor) in enumerate(zip(lengths, factors, strict=True)):
        if length != x.shape[axis] or factor != 1:
            x = _resize_axis(node, x, axis, length, factor)
    return x


def _resize_axis(node: Node, x: Tensor, axis: int, length: int, factor: float) -> Tensor:
    source, mode = x.shape[axis], node.get("mode", "nearest")
    places = _places(node, source, length, factor)
    if mode == "nearest":
        rounding = node.get("nearest_mode", "round_prefer_floor")
        if node.opset < 11:  # as in ONNX Runtime
            rounding = "ceil" if factor < 1 else "floor"
        return x.index_select(axis, _nearest(rounding, places).clamp(0, source - 1))
    if mode not in ("linear", "bilinear", "trilinear"):
        raise node.unsupported(f"a Resize of mode '{mode}'")
    below = torch.floor(places)
    share = (places - below).to(x.dtype).reshape([-1 if d == axis else 1 for d in range(x.ndim)])
    low, high = (x.index_select(axis, at.long().clamp(0, source - 1)) for at in (below, below + 1))
    return low * (1 - share) + high * share


def _places(node: Node, source: int, length: int, factor: float) -> Tensor:
    """For each element of the result, its position in the source. FP32 rounds ties as ONNX Runtime does."""
    coordinates = "asymmetric" if node.opset < 11 else node.get("coordinate_transformation_mode", "half_pixel")
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
