"""Normalisation by statistics of a batch, a layer, an instance or a group."""

from __future__ import annotations

from penstock.offline.compress.training.operators.registry import Node, operator, table
from penstock.offline.compress.training.torch import Tensor, functional, torch


@operator("BatchNormalization", weights=(1, 2), fixed=(3, 4))
def batch_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Normalise by the mean and variance that the model file contains."""
    if node.get("training_mode", 0):
        raise node.unsupported("a BatchNormalization with training_mode=1")
    return functional.batch_norm(x, mean, variance, scale, bias, eps=node.get("epsilon", 1e-5))


@operator("LayerNormalization", weights=(1, 2))
def layer_normalization(
    node: Node, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    axis, epsilon = node.get("axis", -1) % x.ndim, node.get("epsilon", 1e-5)
    y = functional.layer_norm(x, x.shape[axis:], eps=epsilon) * scale
    y = y if bias is None else y + bias
    if len(node.outputs) == 1:
        return y
    axes = list(range(axis, x.ndim))
    mean, variance = x.mean(axes, keepdim=True), x.var(axes, unbiased=False, keepdim=True)
    return y, mean, torch.rsqrt(variance + epsilon)


def _lp_normalization(x: Tensor, *, p: int = 2, axis: int = -1) -> Tensor:
    """Rows of zeros stay zero, as in ONNX Runtime."""
    norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    return x / torch.where(norm == 0, 1.0, norm)


# GroupNormalization of opset 21. ONNX withdrew the older form, which had one scale per group.
table(
    {
        "GroupNormalization": lambda x, scale, bias, *, num_groups=1, epsilon=1e-5: torch.group_norm(
            x, num_groups, scale, bias, epsilon
        ),
        "InstanceNormalization": lambda x, scale, bias, *, epsilon=1e-5: torch.group_norm(
            x, x.shape[1], scale, bias, epsilon
        ),
    },
    weights=(1, 2),
)
table(
    {
        "RMSNormalization": lambda x, scale, *, axis=-1, epsilon=1e-5: (
            functional.rms_norm(x, x.shape[axis:], eps=epsilon) * scale
        )
    },
    weights=(1,),
)
table({"LpNormalization": _lp_normalization})


@operator("LRN")
def local_response_normalization(node: Node, x: Tensor) -> Tensor:
    size = node.get("size")
    squares = functional.pad((x * x).movedim(1, -1), ((size - 1) // 2, size // 2))
    sums = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / (node.get("bias", 1.0) + node.get("alpha", 1e-4) / size * sums) ** node.get("beta", 0.75)
