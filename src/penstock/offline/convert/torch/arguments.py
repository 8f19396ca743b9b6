"""How the flat inputs of an ONNX model form the arguments of a torch module: nested lists, dictionaries and dataclasses.

The input ``cache__0__1`` is ``cache[0][1]`` of the parameter ``cache``, and ``batch__mask`` is ``batch["mask"]`` or ``batch.mask``.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import torch
from torch import nn

from penstock.engines.torch import leaves
from penstock.errors import InvalidArgument, Unsupported

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
Tree = dict[str, Any]
"""Nested dictionaries of tensors, by the parts of the inputs' names."""


class Parameter(typing.NamedTuple):
    """A parameter of ``forward``."""

    name: str
    kind: Any
    is_required: bool
    annotation: Any


class Arguments:
    """Places the flat ``inputs`` in the parameters of ``module``. Raises InvalidArgument if they do not fit."""

    def __init__(self, module: nn.Module, inputs: Sequence[str]) -> None:
        self.inputs = tuple(inputs)
        self.parameters = parameters_of(module)
        self._paths = _paths(self.parameters, self.inputs)
        given = {path[0] for path in self._paths}
        kinds = {one.name: one.kind for one in self.parameters}
        self._has_rest = any(kinds[name] is inspect.Parameter.VAR_POSITIONAL for name in given)
        if missing := [one.name for one in self.parameters if one.is_required and one.name not in given]:
            raise InvalidArgument(
                f"the module needs the inputs {missing}, but only {list(inputs)} are declared",
                "declare all inputs with --inputs, or give all as --sample",
            )

    def nested(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The positional and named arguments for ``tensors``, one for each input."""
        tree: Tree = {}
        for path, tensor in zip(self._paths, tensors, strict=True):
            inner = tree
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = tensor
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for one in self.parameters:
            if one.name not in tree:
                continue
            value = _built(tree[one.name], one.annotation)
            if one.kind is inspect.Parameter.VAR_POSITIONAL:
                positional += value.values() if isinstance(value, dict) else value
            elif one.kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            elif one.kind is inspect.Parameter.POSITIONAL_ONLY or self._has_rest:
                positional.append(value)
            else:
                named[one.name] = value
        return positional, named


class Flat(nn.Module):  # type: ignore[misc]
    """Calls ``module`` with flat tensors, and returns the tensors of its result in a tuple."""

    def __init__(self, module: nn.Module, arguments: Arguments, kept: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.module = module
        self.arguments = arguments
        self.kept = kept

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [tensor for _, tensor in self.named(tensors)]
        return tuple(found[place] for place in self.kept) if self.kept else tuple(found)

    def named(self, tensors: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """All outputs with their names."""
        positional, named = self.arguments.nested(tensors)
        return [(name, _as_tensor(value, name)) for name, value in leaves(self.module(*positional, **named))]


def parameters_of(module: nn.Module) -> list[Parameter]:
    """The parameters of ``forward`` without ``self``."""
    if isinstance(module, torch.jit.ScriptModule):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return [
            Parameter(one.name, kind, not one.has_default_value(), _annotation(one.type))
            for one in module.forward.schema.arguments[1:]
        ]
    try:
        declared = list(inspect.signature(module.forward).parameters.values())
    except ValueError:  # a function in C++
        return [Parameter("inputs", inspect.Parameter.VAR_POSITIONAL, False, None)]
    try:
        hints = typing.get_type_hints(module.forward)
    except Exception:  # noqa: BLE001 - annotations can name anything
        hints = {}
    return [
        Parameter(one.name, one.kind, one.default is one.empty and one.kind not in _VARIABLE, hints.get(one.name))
        for one in declared
    ]


def _paths(parameters: Sequence[Parameter], inputs: Sequence[str]) -> list[tuple[str, ...]]:
    """The parameter of each input, and the keys inside it. Names that no parameter has are taken in order."""
    by_name = [_path(parameters, name) for name in inputs]
    found = [path for path in by_name if path]
    if len(found) == len(inputs):
        return found
    plain = [one for one in parameters if one.kind not in _VARIABLE]
    names = [one.name for one in plain]
    variable = [one.name for one in parameters if one.kind is inspect.Parameter.VAR_POSITIONAL]
    if len(plain) == 1 and get_origin(plain[0].annotation) in (dict, Mapping):
        return [(plain[0].name, name) for name in inputs]
    if found:
        unknown = [name for name, path in zip(inputs, by_name, strict=True) if not path]
        raise InvalidArgument(f"the module has no parameters {unknown}", f"its parameters are {names}")
    if len(inputs) > len(plain) and not variable:
        raise InvalidArgument(f"{len(inputs)} inputs are declared, but the module takes {len(plain)}: {names}")
    extra = [(variable[0], str(place)) for place in range(len(inputs) - len(plain))] if variable else []
    return [*((name,) for name in names[: len(inputs)]), *extra]


def _path(parameters: Sequence[Parameter], name: str) -> tuple[str, ...]:
    """The path of the input ``name``; empty if no parameter has its name. The longest parameter wins."""
    plain = sorted((one.name for one in parameters if one.kind not in _VARIABLE), key=len, reverse=True)
    for parameter in plain:
        if name == parameter:
            return (name,)
        if name.startswith(f"{parameter}__"):
            return (parameter, *name[len(parameter) + 2 :].split("__"))
    keywords = [one.name for one in parameters if one.kind is inspect.Parameter.VAR_KEYWORD]
    return (keywords[0], name) if keywords else ()


def _built(tree: Any, annotation: Any) -> Any:
    """The argument that ``tree`` describes, of the annotated type."""
    if not isinstance(tree, dict):
        return tree
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next((one for one in get_args(annotation) if one not in (type(None), torch.Tensor)), None)
    origin, inner = get_origin(annotation) or annotation, get_args(annotation)
    if isinstance(origin, type) and (dataclasses.is_dataclass(origin) or hasattr(origin, "_fields")):
        hints = typing.get_type_hints(origin)
        keys = origin._fields if hasattr(origin, "_fields") else [one.name for one in dataclasses.fields(origin)]
        names = {key: keys[int(key)] if key.isdecimal() and int(key) < len(keys) else key for key in tree}
        return origin(**{names[key]: _built(value, hints.get(names[key])) for key, value in tree.items()})
    if sorted(tree) != sorted(map(str, range(len(tree)))):
        return {key: _built(value, inner[-1] if inner else None) for key, value in tree.items()}
    items = [_built(tree[str(place)], _item(inner, place)) for place in range(len(tree))]
    return items if origin is list else tuple(items)


def _item(inner: tuple[Any, ...], place: int) -> Any:
    """The annotation of an item in ``list[item]``, ``tuple[item, ...]`` or ``tuple[first, second]``."""
    if not inner:
        return None
    return inner[place] if place < len(inner) and inner[-1] is not ... else inner[0]


def _annotation(kind: Any) -> Any:
    """The Python annotation of a TorchScript type."""
    if isinstance(kind, torch.OptionalType):
        return _annotation(kind.getElementType())
    if isinstance(kind, torch.ListType):
        return types.GenericAlias(list, (_annotation(kind.getElementType()),))
    if isinstance(kind, torch.TupleType):
        return types.GenericAlias(tuple, tuple(map(_annotation, kind.elements())))
    if isinstance(kind, torch.DictType):
        return types.GenericAlias(dict, (str, _annotation(kind.getValueType())))
    return None


def _as_tensor(value: Any, name: str) -> torch.Tensor:
    """An output as a tensor: numbers, such as sizes, become scalars."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (bool, torch.SymBool)):
        return torch.scalar_tensor(value, dtype=torch.bool)
    if isinstance(value, (int, torch.SymInt)):
        return torch.scalar_tensor(value, dtype=torch.int64)
    if isinstance(value, (float, torch.SymFloat)):
        return torch.scalar_tensor(value, dtype=torch.float32)
    raise Unsupported(
        f"the module returns a {type(value).__name__} as output '{name}'",
        "return tensors, or tuples, lists, dictionaries and dataclasses of tensors",
    )
