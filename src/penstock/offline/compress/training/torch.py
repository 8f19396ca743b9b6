"""The only import of torch, an optional package. If torch is not installed, importing this module raises EngineUnavailable."""

from __future__ import annotations

from penstock.errors import EngineUnavailable

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError as error:
    raise EngineUnavailable("torch", "penstock[torch]") from error

__all__ = ["Tensor", "functional", "nn", "torch"]
