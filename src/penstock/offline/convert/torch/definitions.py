"""Checks the user's definitions of operators, so that a mistake is reported with its line and not as a failure of an exporter."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from penstock.engines.torch import reason_of
from penstock.errors import InvalidArgument
from penstock.offline.convert.custom_ops import CustomOp


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
                code = _code(one)
                lines = [frame.lineno for frame in frames if code and frame.filename == code.co_filename]
                is_call = isinstance(cause, TypeError) and f"{one.function.__name__}()" in str(cause)
                if lines or is_call:
                    raised = f"raised {type(cause).__name__}: {reason_of(cause)}"
                    raise _wrong(one, raised, lines[-1] if lines else None) from error
        raise


def _wrong(one: CustomOp, told: str, line: int | None = None) -> WrongDefinition:
    code, schemas = _code(one), torch._C._jit_get_schemas_for_operator(one.name.partition(".")[0])  # noqa: SLF001
    place = f" ({Path(code.co_filename).name}:{line or code.co_firstlineno})" if code else ""
    takes = f"; it must take and return what the operator does: {schemas[0]}" if schemas else ""
    return WrongDefinition(f"the definition of '{one.name}' {told}{place}", f"correct the definition{takes}")


def _code(one: CustomOp) -> Any:
    """The code of the definition. onnxscript wraps it."""
    return getattr(inspect.unwrap(getattr(one.function, "function", one.function)), "__code__", None)


def _kinds(value: Any) -> list[str]:
    """The types of the tensors in ``value``."""
    return [
        str(one.dtype) if isinstance(one, torch.Tensor) else type(one).__name__ for one in pytree.tree_leaves(value)
    ]


def _causes(error: BaseException | None) -> Iterator[Exception]:
    while isinstance(error, Exception):
        yield error
        error = error.__cause__ or error.__context__
