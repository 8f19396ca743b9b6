"""Windows that slide over spatial axes, for Conv, ConvTranspose and pooling."""

from __future__ import annotations

from typing import NamedTuple

from penstock.offline.compress.training.operators.registry import Node
from penstock.offline.compress.training.torch import Tensor, functional


class Windows(NamedTuple):
    """The parameters of windows, with one number per spatial axis."""

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    begin: list[int]
    """Padding before the first element."""
    end: list[int]
    """Padding after the last element."""

    @property
    def reach(self) -> list[int]:
        """The size of the dilated kernel."""
        return [(size - 1) * gap + 1 for size, gap in zip(self.kernel, self.dilation, strict=True)]

    def pad(self, x: Tensor, value: float = 0.0) -> Tensor:
        return pad(x, self.begin, self.end, value)


def read_windows(node: Node, kernel: list[int], sizes: list[int]) -> Windows:
    """The windows of ``node`` over spatial ``sizes``, with ``auto_pad`` resolved as for Conv and pooling."""
    rank = len(kernel)
    stride, dilation = (list(node.get(name) or [1] * rank) for name in ("strides", "dilations"))
    pads = list(node.get("pads") or [0] * (2 * rank))
    windows = Windows(kernel, stride, dilation, pads[:rank], pads[rank:])
    auto_pad = node.get("auto_pad", "NOTSET")
    if auto_pad == "VALID":
        return windows._replace(begin=[0] * rank, end=[0] * rank)
    if auto_pad == "NOTSET":
        return windows
    totals = [
        max(0, (-(-size // step) - 1) * step + reach - size)
        for size, step, reach in zip(sizes, stride, windows.reach, strict=True)
    ]
    begin, end = share(totals, upper=auto_pad == "SAME_UPPER")
    return windows._replace(begin=begin, end=end)


def share(totals: list[int], upper: bool) -> tuple[list[int], list[int]]:
    """Split padding into the parts before and after. If it is odd, the part after is larger if ``upper``, otherwise the other."""
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (small, large) if upper else (large, small)


def pad(x: Tensor, begin: list[int], end: list[int], value: float = 0.0) -> Tensor:
    """Pad the last axes of ``x``; negative numbers crop."""
    if not any(begin) and not any(end):
        return x
    pairs = [size for pair in zip(reversed(begin), reversed(end), strict=True) for size in pair]
    return functional.pad(x, pairs, value=value)
