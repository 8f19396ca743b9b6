"""PyTorch: converts modules, TorchScript, exported programs, pickled modules, and modules with weights of their own file."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from penstock.engines.custom_ops import custom_ops
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.convert.base import ConvertOptions, FrameworkModel
from penstock.offline.convert.torch.files import load_weights, read_file
from penstock.offline.convert.torch.source import open_exported, open_module


class TorchConverter:
    """Opens everything that torch runs."""

    name = "torch"
    version: str = torch.__version__.partition("+")[0]

    def open(self, source: Any, options: ConvertOptions) -> FrameworkModel:
        """``source`` is a path, a module, an exported program, a function of tensors, or a function that makes one of them."""
        custom_ops(options.ops)  # a program can be read only after its operators are defined
        options = msgspec.structs.replace(options, ops=None)
        made = read_file(Path(source), options) if isinstance(source, (str, os.PathLike)) else _made(source)
        if options.weights is not None:
            if not isinstance(made, nn.Module):
                raise InvalidArgument(
                    f"--weights needs a module, got {type(made).__name__}", "give module:callable as the source"
                )
            load_weights(made, options.weights)
        if isinstance(made, torch.export.ExportedProgram):
            return open_exported(made, options)
        return open_module(made, options)


def _made(source: Any) -> Any:
    """The module or program that ``source`` is or makes."""
    if isinstance(source, (nn.Module, torch.export.ExportedProgram)):
        return source
    if isinstance(source, torch.jit.ScriptFunction) or (callable(source) and _takes_arguments(source)):
        return _Function(source)
    found = source() if callable(source) else source
    if isinstance(found, (nn.Module, torch.export.ExportedProgram)):
        return found
    raise Unsupported(
        f"the source is a {type(found).__name__}, not a PyTorch module",
        "give an nn.Module, a function of tensors, or a function that returns a module",
    )


def _takes_arguments(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function in C++
        return True
    return any(one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parameters)


class _Function(nn.Module):  # type: ignore[misc]
    """A module that calls a function of tensors."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


CONVERTER = TorchConverter()
