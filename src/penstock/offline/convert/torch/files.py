"""Reads torch's files: TorchScript, exported programs, pickled modules and weights. Nothing is loaded that can run arbitrary code."""

from __future__ import annotations

import importlib
import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from torch import nn

from penstock.engines.torch import read_program, reason_of
from penstock.engines.torch_archive import record_names
from penstock.errors import InvalidArgument, InvalidModel, PenstockError, PermissionDenied
from penstock.offline.convert import reading
from penstock.offline.convert.base import ConvertOptions, UnsupportedOperator, UnsupportedOperators

_PACKAGES = ("torch", "torchvision", "timm")
"""Packages whose modules may be in a pickle that the user trusts."""
_SHOWN = 5
_TARGET = re.compile(rb'"target": *"torch\.ops\.(\w+)\.(\w+)')
_GIVE_MODULE = "give the module as package.module:make_model, and the file as --weights"


def read_file(path: Path, options: ConvertOptions) -> Any:
    """The module or exported program in the file ``path``. Raises NotFound, InvalidModel, InvalidArgument, PermissionDenied."""
    data = reading.read_file(path, "file")
    if not data.startswith(b"PK"):
        raise _not_an_archive(path, data)
    names = record_names(data)
    try:
        if "constants.pkl" in names:
            return torch.jit.load(io.BytesIO(data), map_location="cpu")
        if any(name.startswith("models/") for name in names):
            return read_program(data)
        found = _unpickled(path, data, options.trust_pickle)
    except PenstockError:
        raise
    except Exception as error:
        if absent := _absent_operators(data):
            raise UnsupportedOperators.of(absent) from error
        raise InvalidModel(f"PyTorch cannot read '{path.name}': {reason_of(error)}", "save the model again") from error
    if isinstance(found, (nn.Module, torch.export.ExportedProgram)):
        return found
    raise InvalidArgument(f"'{path.name}' contains only weights", _GIVE_MODULE)


def load_weights(module: nn.Module, path: Path) -> None:
    """Load the weights in ``path`` into ``module``. Raises NotFound, InvalidArgument, InvalidModel."""
    weights = read_weights(path)
    wanted = module.state_dict()
    for prefix in ("module.", "model.", "_orig_mod."):  # from DataParallel, trainers, torch.compile
        if weights and all(name.startswith(prefix) for name in weights) and not any(name in wanted for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    tied = _tied(wanted)
    missing = [name for name in wanted if name not in weights and not tied[name] & weights.keys()]
    unexpected = sorted(name for name in weights if name not in wanted)  # safetensors gives them in any order
    shapes = [
        f"{name} is {list(weights[name].shape)} instead of {list(value.shape)}"
        for name, value in wanted.items()
        if name in weights and weights[name].shape != value.shape
    ]
    parts = (("it lacks", missing), ("the module has no", unexpected), ("sizes differ:", shapes))
    if told := [f"{what} {_shown(names)}" for what, names in parts if names]:
        raise InvalidArgument(
            f"the weights in '{path.name}' do not fit the module: {'; '.join(told)}",
            "make the module with the configuration that it was trained with",
        )
    module.load_state_dict(weights, strict=False)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in ``path``, by name. Raises NotFound, InvalidModel."""
    data = reading.read_file(path, "file")
    try:
        if path.suffix == ".safetensors":
            return dict(load_safetensors(data))
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise InvalidModel(
            f"cannot read the weights in '{path.name}': {reason_of(error)}",
            "save only the weights: torch.save(model.state_dict(), path)",
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise InvalidModel(
            f"'{path.name}' contains a {type(found).__name__}, not weights by name",
            "save only the weights: torch.save(model.state_dict(), path)",
        )
    return dict(found)


def _unpickled(path: Path, data: bytes, is_trusted: bool) -> Any:
    """The object that torch.save wrote. Only tensors, and modules of known packages, are unpickled."""
    names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    if names and not is_trusted:
        raise PermissionDenied(
            f"'{path.name}' is a pickle that names {_shown(names)}; loading it can run code",
            f"add --trust-pickle if you trust it; better, {_GIVE_MODULE}",
        )
    allowed: dict[str, Any] = {name: found for name in names if (found := _module_class(name)) is not None}
    if forbidden := [name for name in names if name not in allowed]:
        raise PermissionDenied(
            f"'{path.name}' names {_shown(forbidden)}, which are not modules of PyTorch, torchvision or timm",
            f"save only the weights, and {_GIVE_MODULE}",
        )
    with torch.serialization.safe_globals(list(allowed.values())):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _module_class(name: str) -> Any:
    """The class or function ``name``, if it is on the allow-list: a module of a known package, or an activation function of torch."""
    home, _, attribute = name.rpartition(".")
    if (
        home.partition(".")[0] not in _PACKAGES or ".test" in home or "__" in home
    ):  # before the import, which can run code
        return None
    try:
        found = getattr(importlib.import_module(home), attribute, None)
    except Exception:  # noqa: BLE001 - a module that cannot be imported here can raise anything
        return None
    is_activation = home in ("torch.nn.functional", "torch._C._nn") and callable(found)
    return found if is_activation or (isinstance(found, type) and issubclass(found, nn.Module)) else None


def _not_an_archive(path: Path, data: bytes) -> PenstockError:
    if path.suffix == ".safetensors":
        return InvalidArgument(f"'{path.name}' contains only weights", _GIVE_MODULE)
    if data.startswith(b"\x80"):
        return InvalidModel(
            f"'{path.name}' is a pickle without an archive, as PyTorch before 1.6 wrote it",
            "load it with PyTorch, and save it again with torch.save",
        )
    return InvalidModel(f"'{path.name}' is not a file of PyTorch, or is truncated", "save the model again")


def _absent_operators(data: bytes) -> list[UnsupportedOperator]:
    """The operators of an exported program that torch does not have, because the library that defines them is not imported."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            programs = [archive.read(name) for name in archive.namelist() if name.endswith("models/model.json")]
    except Exception:  # noqa: BLE001 - of a damaged archive
        return []
    found = dict.fromkeys(one for program in programs for one in _TARGET.findall(program))
    names = ((namespace.decode(), name.decode()) for namespace, name in found)
    absent = [f"{one}::{name}" for one, name in names if not hasattr(getattr(torch.ops, one), name)]
    way_out = (
        "import the library that defines it, and define it with @penstock.register_op('{}'), in a file given as --ops"
    )
    return [UnsupportedOperator(name, "", way_out.format(name)) for name in absent]


def _tied(wanted: Mapping[str, torch.Tensor]) -> dict[str, set[str]]:
    """The names that share each tensor's memory. safetensors stores only one of them."""
    by_memory: dict[tuple[int, int], set[str]] = {}
    for name, value in wanted.items():
        by_memory.setdefault((value.data_ptr(), value.numel()), set()).add(name)
    return {name: by_memory[value.data_ptr(), value.numel()] for name, value in wanted.items()}


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_SHOWN]) + more
