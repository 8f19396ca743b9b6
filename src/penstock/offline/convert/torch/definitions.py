"""Checks the user's definitions of operators, so that a mistake is reported with its line and not as a failure of an exporter."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from onnx.defs import OpSchema
from onnxscript import values
from torch._guards import detect_fake_mode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from penstock.engines.custom_ops import CustomOp
from penstock.engines.torch import BY_TORCH_TYPE, reason_of
from penstock.errors import InvalidArgument
from penstock.tensor import DataType

_WHOLE, _NUMBER = "whole numbers", "numbers"
"""Arguments that are no tensors become constants of the declared type."""


class WrongDefinition(InvalidArgument):
    """A definition given with ``@penstock.register_op`` fails, or returns other types than the operator."""


def check_definitions(program: Any, operators: Mapping[Any, CustomOp]) -> None:
    """Call the definitions on tensors without data, as ``program`` calls the operators. Raises WrongDefinition."""
    for node in program.graph.nodes:
        if node.target not in operators:
            continue
        one, wanted = operators[node.target], node.meta["val"]
        arguments, named = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        with blaming({node.target: one}), detect_fake_mode(wanted) or contextlib.nullcontext(), torch.no_grad():
            found = one.function(*arguments, **named)
        kinds, expected = _kinds(found), _kinds(wanted)
        if found is not NotImplemented and kinds != expected:
            raise _wrong(one, f"returns {kinds}, but the operator returns {expected}")


@contextlib.contextmanager
def blaming(operators: Mapping[Any, CustomOp]) -> Iterator[None]:
    """Raise WrongDefinition in place of an error that comes from one of the definitions."""
    try:
        yield
    except Exception as error:
        for cause in _causes(error):
            frames = traceback.extract_tb(cause.__traceback__)
            for one in operators.values():
                code = one.code
                lines = [frame.lineno for frame in frames if code and frame.filename == code.co_filename]
                is_call = isinstance(cause, TypeError) and f"{one.function.__name__}()" in str(cause)
                if lines or is_call:
                    raised = f"raised {type(cause).__name__}: {reason_of(cause)}"
                    raise _wrong(one, raised, lines[-1] if lines else None) from error
        raise


def check_python(program: Any, operators: Mapping[Any, CustomOp]) -> None:
    """Compare the types of operators in Python with the tensors and numbers in ``program``. Raises WrongDefinition."""
    for node in program.graph.nodes:
        if node.target not in operators:
            continue
        one, given = operators[node.target], _arguments(node.target, node.args, node.kwargs)
        found = [_datatype(each.meta["val"] if isinstance(each, torch.fx.Node) else each) for each in given]
        returned = [_datatype(each) for each in pytree.tree_leaves(node.meta["val"])]
        for what, wanted, types in (("inputs", one.inputs, found), ("outputs", one.outputs, returned)):
            if len(wanted) != len(types) or not all(map(_fits, types, wanted)):
                listed = ", ".join(each.value for each in wanted)
                raise _wrong(one, f"declares the {what} {listed}, but the model has {', '.join(types)}")


def _fits(kind: str, wanted: DataType) -> bool:
    return kind in (_WHOLE, wanted.value) or (kind == _NUMBER and wanted.dtype.kind == "f")


def _datatype(value: Any) -> str:
    if isinstance(value, torch.SymInt):
        return DataType.INT64.value
    if isinstance(value, torch.Tensor):
        return BY_TORCH_TYPE[value.dtype].value if value.dtype in BY_TORCH_TYPE else str(value.dtype)
    plain = value if isinstance(value, list | tuple) and value else [value]
    if all(isinstance(each, bool | int) for each in plain):
        return _WHOLE
    return _NUMBER if all(isinstance(each, bool | int | float) for each in plain) else type(value).__name__


def in_onnx(overload: Any, one: CustomOp) -> Any:
    """Writes the operator in Python ``one`` as a node. onnxscript casts numbers to the types of the inputs."""
    of = {DataType.FP32: "float", DataType.FP64: "double", DataType.BYTES: "string"}
    inputs, outputs = (
        [
            OpSchema.FormalParameter(f"{name}{at}", f"tensor({of.get(kind, kind.dtype.name)})")
            for at, kind in enumerate(kinds)
        ]
        for name, kinds in (("x", one.inputs), ("y", one.outputs))
    )
    schema = OpSchema(one.operator, one.domain, 1, inputs=inputs, outputs=outputs)
    written = values.Op(values.Opset(one.domain, 1), one.operator, schema)
    return lambda *given, **named: written(*_arguments(overload, given, named))


def _arguments(overload: Any, given: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call in the order of the operator's parameters."""
    rest = overload._schema.arguments[len(given) :]  # noqa: SLF001
    return [*given, *(named.get(each.name, each.default_value) for each in rest)]


def _wrong(one: CustomOp, told: str, line: int | None = None) -> WrongDefinition:
    code, schemas = one.code, torch._C._jit_get_schemas_for_operator(one.name.partition(".")[0])  # noqa: SLF001
    place = f" ({Path(code.co_filename).name}:{line or code.co_firstlineno})" if code else ""
    takes = f"; it must take and return what the operator does: {schemas[0]}" if schemas else ""
    return WrongDefinition(f"the definition of '{one.name}' {told}{place}", f"correct the definition{takes}")


def _kinds(value: Any) -> list[str]:
    """The types of the tensors in ``value``."""
    return [
        str(one.dtype) if isinstance(one, torch.Tensor) else type(one).__name__ for one in pytree.tree_leaves(value)
    ]


def _causes(error: BaseException | None) -> Iterator[Exception]:
    while isinstance(error, Exception):
        yield error
        error = error.__cause__ or error.__context__
