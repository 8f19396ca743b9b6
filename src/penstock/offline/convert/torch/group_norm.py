"""Group normalisation by the operator InstanceNormalization of ONNX.

ONNX Runtime computes the variance of GroupNormalization as the mean of the squares minus the square of the mean. For values that are
nearly equal, as in a blank image, rounding makes it negative, and the result NaN. Its InstanceNormalization subtracts the mean first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_GROUP_NORM = torch.ops.aten.group_norm.default


def is_group_norm(node: torch.fx.Node) -> bool:
    return bool(node.target == _GROUP_NORM)


def decomposition() -> dict[Any, Callable[..., Any]]:
    """The decomposition into the normalisation of each group, and the factors and terms of the channels."""

    def group_norm(
        x: torch.Tensor,
        groups: int,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        epsilon: float = 1e-5,
        cudnn: bool = True,
    ) -> torch.Tensor:
        rows = x.reshape(x.shape[0], groups, -1)
        found = torch.instance_norm(rows, None, None, None, None, True, 0.0, epsilon, False).reshape(x.shape)
        channels = (-1, *[1] * (x.dim() - 2))
        found = found if weight is None else found * weight.reshape(channels)
        return found if bias is None else found + bias.reshape(channels)

    return {_GROUP_NORM: group_norm}
