"""The declarations of typed models: ``@model`` marks a function or class, and its ``Tensor`` type hints define the signature."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np

from penstock.errors import InvalidModel, Unsupported
from penstock.tensor import Array, DataType, Signature, TensorSpec

_MARK = "__penstock_model__"
_ONLY_OUTPUT = "output"

_Form = TypeVar("_Form", bound=Callable[..., Any])


class Tensor:
    """The datatype and shape of an array, as a type hint: ``Tensor["FP32", -1, 4]``.

    The datatype is a name of the protocol or a numpy dtype. A dimension of -1 may have any size. If the first dimension of every
    input and output is -1, it is the batch dimension, along which requests are merged. Type checkers prefer
    ``Annotated[np.ndarray, Tensor("FP32", -1, 4)]``. Raises InvalidModel.
    """

    def __init__(self, datatype: Any, *shape: int) -> None:
        try:
            self.datatype = DataType(datatype) if isinstance(datatype, str) else DataType.from_numpy(np.dtype(datatype))
        except (ValueError, TypeError, Unsupported):
            known = ", ".join(one.value for one in DataType)
            raise InvalidModel(f"a Tensor cannot hold {datatype!r}", f"use one of {known}") from None
        if not all(isinstance(dim, int) and dim >= -1 for dim in shape):
            raise InvalidModel(f"a Tensor cannot have the shape {list(shape)}", "use -1 for a dimension of any size")
        self.shape = shape

    def __class_getitem__(cls, item: Any) -> Any:
        return Annotated[np.ndarray, cls(*(item if isinstance(item, tuple) else (item,)))]


def model(form: _Form) -> _Form:
    """Mark a function as the model of its ``model.py``. The function's type hints declare the inputs and outputs.

    Mark a class instead if the model has state or needs clean-up. The method ``forward`` then has the type hints. The class may also
    have the method ``load``, which receives the context before the first request, and the method ``unload``.
    """
    setattr(form, _MARK, True)
    return form


def is_marked(value: Any) -> bool:
    return (inspect.isfunction(value) or inspect.isclass(value)) and _MARK in vars(value)


def read_form(function: Callable[..., Any], declared: Signature, context: type) -> tuple[Signature, str]:
    """The signature of ``function``, and the name of its context parameter, or "" without such a parameter.

    The specs of inputs and outputs without type hints come from ``declared``. Raises InvalidModel.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise InvalidModel(f"a type hint of '{function.__name__}' is wrong: {error}") from None
    inputs, context_name = [], ""
    known = {spec.name: spec for spec in declared.inputs}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name)
        if hint is context or (hint is None and name == "context"):
            context_name = name
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
        missing = "inputs" if not inputs else "outputs"
        raise InvalidModel(f"'{function.__name__}' declares no {missing}", "add type hints")
    return Signature(tuple(inputs), tuple(outputs)), context_name


def _tensor(hint: Any) -> Tensor | None:
    return next((one for one in typing.get_args(hint)[1:] if isinstance(one, Tensor)), None)


def _outputs(hint: Any, declared: Signature) -> list[TensorSpec]:
    if _tensor(hint) is not None:
        hints = {declared.outputs[0].name if len(declared.outputs) == 1 else _ONLY_OUTPUT: hint}
    elif typing.get_origin(hint) is tuple:
        hints = {f"{_ONLY_OUTPUT}_{number}": one for number, one in enumerate(typing.get_args(hint))}
    elif isinstance(hint, type) and getattr(hint, "__annotations__", None):
        hints = typing.get_type_hints(hint, include_extras=True)  # a TypedDict, a NamedTuple or a dataclass
    else:
        return list(declared.outputs)
    outputs = []
    for name, one in hints.items():
        if (tensor := _tensor(one)) is None:
            raise InvalidModel(f"output '{name}' has no Tensor as its type hint", 'write e.g. Tensor["FP32", -1, 4]')
        outputs.append(TensorSpec(name, tensor.datatype, tensor.shape))
    return outputs


def by_name(result: Any, signature: Signature) -> dict[str, Array]:
    """The outputs in ``result``, which is a dictionary, a tuple in the signature's order, or the only output.

    Raises ValueError.
    """
    names = signature.output_names
    if isinstance(result, tuple):
        if len(result) != len(names):
            raise ValueError(f"it returned {len(result)} outputs, expected {len(names)}")
        result = dict(zip(names, result, strict=True))
    elif not isinstance(result, dict):
        if len(names) != 1:
            raise ValueError(f"it returned one {type(result).__name__}, expected the outputs {names}")
        result = {names[0]: result}
    if set(result) != set(names):
        raise ValueError(f"it returned the outputs {sorted(map(str, result))}, expected {sorted(names)}")
    return {spec.name: _array(spec, result[spec.name]) for spec in signature.outputs}


def _array(spec: TensorSpec, value: Any) -> Array:
    """Convert numbers and lists to the declared datatype. Arrays keep their datatype. Raises ValueError."""
    if isinstance(value, int | float | str | bytes | list):
        return np.asarray(value, spec.datatype.dtype)
    array = np.asarray(value)
    if array.dtype == object and not isinstance(value, np.ndarray):
        raise ValueError(f"output '{spec.name}' is a {type(value).__name__}, not an array")
    return array
