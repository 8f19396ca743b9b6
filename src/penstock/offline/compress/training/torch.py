"""The only import of torch, an optional package. Without torch it raises EngineUnavailable, which says how to install it."""

from __future__ import annotations

from penstock.errors import EngineUnavailable

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError as error:
    raise EngineUnavailable("torch", "penstock[torch]") from error

__all__ = ["Tensor", "functional", "nn", "torch"]
