"""The only import of torch, an optional package. Raises EngineUnavailable if it is not installed."""

from __future__ import annotations

from penstock.errors import EngineUnavailable

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError as error:
    raise EngineUnavailable("torch", "penstock[torch]") from error

__all__ = ["Tensor", "functional", "nn", "torch"]
