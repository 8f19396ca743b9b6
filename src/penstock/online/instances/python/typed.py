"""The words of typed models: ``Tensor`` in type hints gives the signature, ``@model`` marks the function or class."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from penstock.errors import InvalidModel, Unsupported
from penstock.tensor import Array, DataType, Signature, TensorSpec

_MARK = "__penstock_model__"
ONLY_OUTPUT = "output"

_Form = TypeVar("_Form", bound=Callable[..., Any])


class Tensor:
    """A tensor's datatype and shape: ``Tensor["FP32", -1, 4]`` as a type hint, which means an array.

    The datatype is one of the protocol's names or a numpy dtype; -1 is any size, and as the first of every input and output the
    batch, along which requests are merged. Type checkers prefer ``Annotated[np.ndarray, Tensor("FP32", -1, 4)]``.
    Raises InvalidModel.
    """

    def __init__(self, datatype: Any, *shape: int) -> None:
        try:
            self.datatype = DataType(datatype) if isinstance(datatype, str) else DataType.from_numpy(np.dtype(datatype))
        except (ValueError, TypeError, Unsupported):
            known = ", ".join(one.value for one in DataType)
            raise InvalidModel(f"a Tensor cannot hold {datatype!r}", f"known: {known}") from None
        if not all(isinstance(dim, int) and dim >= -1 for dim in shape):
            raise InvalidModel(f"a Tensor cannot have the shape {list(shape)}", "-1 stands for any size")
        self.shape = shape

    def __class_getitem__(cls, item: Any) -> Any:
        return Annotated[np.ndarray, cls(*(item if isinstance(item, tuple) else (item,)))]


def model(form: _Form) -> _Form:
    """Mark a function as the model of its ``model.py``; its type hints declare the inputs and outputs.

    A class is marked for state and clean-up: it has a method ``forward``, whose hints count, and may have ``load``, which is given the
    context before the first request, and ``unload``.
    """
    setattr(form, _MARK, True)
    return form


def is_marked(value: Any) -> bool:
    return (inspect.isfunction(value) or inspect.isclass(value)) and _MARK in vars(value)


class FunctionForm(msgspec.Struct, frozen=True):
    """What the hints of a function say."""

    signature: Signature
    context: str = ""
    """The parameter that is given the context; empty if none is."""


def read_form(function: Callable[..., Any], declared: Signature, context: type) -> FunctionForm:
    """The form of ``function``, a method without its ``self``. What it has no hints for is as ``declared``. Raises InvalidModel."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise InvalidModel(f"a type hint of '{function.__name__}' is wrong: {error}") from None
    inputs, wants = [], ""
    known = {spec.name: spec for spec in declared.inputs}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name)
        if hint is context or (hint is None and name == "context"):
            wants = name
        elif (tensor := _tensor(hint)) is not None:
            inputs.append(TensorSpec(name, tensor.datatype, tensor.shape))
        elif parameter.kind is parameter.VAR_KEYWORD:
            inputs += [spec for spec in declared.inputs if spec not in inputs]
        elif name in known:
            inputs.append(known[name])
        else:
            raise InvalidModel(
                f"parameter '{name}' of '{function.__name__}' has no Tensor as its type hint",
                f'write e.g. {name}: Tensor["FP32", -1, 4]',
            )
    outputs = _outputs(hints.get("return"), declared)
    if not inputs or not outputs:
        what = "inputs" if not inputs else "outputs"
        raise InvalidModel(f"it is not known what {what} '{function.__name__}' has", "give it type hints")
    return FunctionForm(Signature(tuple(inputs), tuple(outputs)), wants)


def _tensor(hint: Any) -> Tensor | None:
    return next((one for one in typing.get_args(hint)[1:] if isinstance(one, Tensor)), None)


def _outputs(hint: Any, declared: Signature) -> list[TensorSpec]:
    if (tensor := _tensor(hint)) is not None:
        name = declared.outputs[0].name if len(declared.outputs) == 1 else ONLY_OUTPUT
        named: dict[str, Tensor | None] = {name: tensor}
    elif typing.get_origin(hint) is tuple:
        named = {f"{ONLY_OUTPUT}_{number}": _tensor(one) for number, one in enumerate(typing.get_args(hint))}
    elif isinstance(hint, type) and getattr(hint, "__annotations__", None):
        # A TypedDict, a NamedTuple or a dataclass.
        fields = typing.get_type_hints(hint, include_extras=True)
        named = {name: _tensor(one) for name, one in fields.items()}
    else:
        return list(declared.outputs)
    for name, found in named.items():
        if found is None:
            raise InvalidModel(f"output '{name}' has no Tensor as its type hint", 'write e.g. Tensor["FP32", -1, 4]')
    return [TensorSpec(name, one.datatype, one.shape) for name, one in named.items() if one is not None]


def by_name(result: Any, signature: Signature) -> dict[str, Array]:
    """What a function returned, as outputs: by name, in order, or the only one. Raises ValueError."""
    names = signature.output_names
    if isinstance(result, tuple):
        if len(result) != len(names):
            raise ValueError(f"it gave {len(result)} outputs, and has {len(names)}")
        result = dict(zip(names, result, strict=True))
    elif not isinstance(result, dict):
        if len(names) != 1:
            raise ValueError(f"it gave one {type(result).__name__}, and has the outputs {names}")
        result = {names[0]: result}
    if set(result) != set(names):
        raise ValueError(f"it gave the outputs {sorted(map(str, result))}, and has {sorted(names)}")
    return {spec.name: _array(spec, result[spec.name]) for spec in signature.outputs}


def _array(spec: TensorSpec, value: Any) -> Array:
    """Numbers and lists become what is declared; arrays must be it already. Raises ValueError."""
    if isinstance(value, int | float | str | bytes | list):
        return np.asarray(value, spec.datatype.dtype)
    array = np.asarray(value)
    if array.dtype == object and not isinstance(value, np.ndarray):
        raise ValueError(f"output '{spec.name}' is of type {type(value).__name__}, which is no array")
    return array
