"""Buffers: restores the state of a torch module after each call, so that every call starts from the same state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class Buffers:
    """The buffers of ``module`` at this moment. ``changed`` names those that a call has changed."""

    def __init__(self, module: nn.Module, prefix: str = "") -> None:
        self._saved = [
            (f"{path}.{key}".removeprefix(prefix).lstrip("."), owner, key, buffer, buffer.detach().clone())
            for path, owner in module.named_modules()
            for key, buffer in owner.named_buffers(recurse=False)
        ]
        self.changed: list[str] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore all buffers at the end."""
        try:
            yield
        finally:
            for name, owner, key, buffer, saved in self._saved:
                is_replaced = getattr(owner, key) is not buffer and not isinstance(owner, torch.jit.ScriptModule)
                if is_replaced or not torch.equal(getattr(owner, key), saved):
                    if name not in self.changed:
                        self.changed.append(name)
                    with torch.no_grad():
                        buffer.copy_(saved)
                    setattr(owner, key, buffer)

    def warning(self) -> list[str]:
        """The warning that calls have changed buffers, if they have."""
        if not self.changed:
            return []
        told = f"the model changes its buffers {self.changed}; each call of the ONNX model starts from their present values"
        return [told]

    def guarded(self, call: Callable[[Sequence[torch.Tensor]], Any]) -> Callable[[Sequence[torch.Tensor]], Any]:
        """``call``, which leaves the buffers unchanged. Its results are copies, because a result can be a buffer."""

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            with self.kept():
                return pytree.tree_map_only(torch.Tensor, torch.clone, call(tensors))

        return run
