"""The one door to torch, an optional package: whoever imports this without it gets EngineUnavailable, which says how to install it."""

from __future__ import annotations

from penstock.errors import EngineUnavailable

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError as error:
    raise EngineUnavailable("torch", "penstock[torch]") from error

__all__ = ["Tensor", "functional", "nn", "torch"]
