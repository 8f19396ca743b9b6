"""Convolutions and matrix products."""

from __future__ import annotations

from penstock.offline.compress.training.operators.registry import Node, operator, table
from penstock.offline.compress.training.operators.windows import pad, read_windows, share
from penstock.offline.compress.training.torch import Tensor, functional, torch
from penstock.offline.optimize.linear import linear_form

table({"MatMul": torch.matmul}, weights=(0, 1))
table({"Einsum": lambda *operands, equation="": torch.einsum(equation, *operands)})

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


@operator("Conv", weights=(1, 2))
def conv(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = _rank(node, x)
    windows = read_windows(node, list(weight.shape[2:]), list(x.shape[2:]))
    padding = windows.begin
    if windows.begin != windows.end:
        x, padding = windows.pad(x), [0] * rank
    return CONVOLUTIONS[rank](
        x, weight, bias, windows.stride, padding, dilation=windows.dilation, groups=node.get("group", 1)
    )


@operator("ConvTranspose", weights=(1, 2))
def conv_transpose(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The full transposed convolution, cropped by the padding, and extended at the end by ``output_padding``."""
    rank, sizes = _rank(node, x), list(x.shape[2:])
    windows = read_windows(node, list(weight.shape[2:]), sizes)
    extra = list(node.get("output_padding") or [0] * rank)
    begin, end = windows.begin, windows.end
    auto_pad, wanted = node.get("auto_pad", "NOTSET"), node.get("output_shape")
    if wanted is None and auto_pad.startswith("SAME"):
        wanted = [size * step for size, step in zip(sizes, windows.stride, strict=True)]
    if wanted is not None:
        full = [(size - 1) * step for size, step in zip(sizes, windows.stride, strict=True)]
        totals = [
            most + more + reach - want
            for most, more, reach, want in zip(full, extra, windows.reach, list(wanted)[-rank:], strict=True)
        ]
        begin, end = share(totals, upper=auto_pad == "SAME_UPPER")
    y = _TRANSPOSED[rank](x, weight, None, windows.stride, groups=node.get("group", 1), dilation=windows.dilation)
    y = pad(y, [-size for size in begin], [more - size for more, size in zip(extra, end, strict=True)])
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


def _rank(node: Node, x: Tensor) -> int:
    rank = int(x.ndim) - 2
    if rank not in CONVOLUTIONS:
        raise node.unsupported(f"a convolution over {rank} spatial axes")
    return rank


@operator("Gemm", weights=(0, 1, 2))
def gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    form = linear_form("Gemm", node.get)
    assert form is not None
    a = a.T if form.transposes_input else a
    b = b.T if form.inputs else b
    if c is None:
        return (a @ b) * form.alpha
    return torch.addmm(c, a, b, beta=form.beta, alpha=form.alpha)
