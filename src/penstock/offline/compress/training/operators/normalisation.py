"""Normalisation by statistics of a batch, a layer, an instance or a group."""

from __future__ import annotations

from penstock.offline.compress.training.operators.registry import Node, operator
from penstock.offline.compress.training.torch import Tensor, functional, torch


@operator("BatchNormalization", weights=(1, 2), fixed=(3, 4))
def batch_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """By the running statistics, which are updated in place where ``node.norms`` takes them from the batch.

    A batch with one value per channel has no variance and is normalised by the running statistics.
    """
    if node.get("training_mode", 0):
        raise node.unsupported("statistics of the batch at inference")
    norms = node.norms
    share = 1 - node.get("momentum", 0.9) if norms.share is None else norms.share
    from_batch = norms.from_batch and x.numel() > x.shape[1]
    return functional.batch_norm(x, mean, variance, scale, bias, from_batch, share, node.get("epsilon", 1e-5))


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


@operator("RMSNormalization", weights=(1,))
def rms_normalization(node: Node, x: Tensor, scale: Tensor) -> Tensor:
    axis = node.get("axis", -1) % x.ndim
    return functional.rms_norm(x, x.shape[axis:], eps=node.get("epsilon", 1e-5)) * scale


@operator("InstanceNormalization", weights=(1, 2))
def instance_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return functional.group_norm(x, x.shape[1], scale, bias, node.get("epsilon", 1e-5))


@operator("GroupNormalization", weights=(1, 2))
def group_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """As of opset 21; the older form, one scale per group, is withdrawn from ONNX."""
    return functional.group_norm(x, node.get("num_groups"), scale, bias, node.get("epsilon", 1e-5))


@operator("LpNormalization")
def lp_normalization(node: Node, x: Tensor) -> Tensor:
    return functional.normalize(x, p=node.get("p", 2), dim=node.get("axis", -1), eps=0.0)


@operator("LRN")
def local_response_normalization(node: Node, x: Tensor) -> Tensor:
    size = node.get("size")
    squares = functional.pad((x * x).movedim(1, -1), ((size - 1) // 2, size // 2))
    sums = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / (node.get("bias", 1.0) + node.get("alpha", 1e-4) / size * sums) ** node.get("beta", 0.75)
