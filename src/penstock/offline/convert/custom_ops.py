"""Custom operators: ``@penstock.register_op`` tells the converters how to write an operator that they do not know."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from penstock.errors import InvalidArgument, NotFound

F = TypeVar("F", bound=Callable[..., Any])
Form = Literal["torch", "onnx"]


class CustomOp(msgspec.Struct, frozen=True):
    """A definition of an operator."""

    name: str
    """``namespace::operator`` or ``namespace::operator.overload``."""
    function: Any
    form: Form


_registered: dict[str, CustomOp] = {}


def register_op(name: str, form: Form = "torch") -> Callable[[F], F]:
    """Register the decorated function as the definition of the torch operator ``name``, such as ``"my_library::clamp_norm"``.

    The function takes the operator's arguments. With form ``"torch"``, it computes the operator from other torch operators. With form
    ``"onnx"``, it is a function of onnxscript, which the exporter calls with ONNX values. A second definition replaces the first.
    """
    if not isinstance(name, str) or name.count("::") != 1:
        raise InvalidArgument(
            f"register_op got the operator {name!r}", "name it as namespace::operator, as in torch.library"
        )
    if form not in get_args(Form):
        raise InvalidArgument(f"register_op got the form {form!r}", "use 'torch' or 'onnx'")

    def register(function: F) -> F:
        _registered[name] = CustomOp(name, function, form)
        return function

    return register


def custom_ops(file: Path | None = None) -> tuple[CustomOp, ...]:
    """All registered operators, after running ``file``. Raises NotFound, InvalidArgument if the file fails."""
    if file is not None:
        run_file(file)
    return tuple(_registered.values())


def run_file(file: Path) -> None:
    """Run the user's Python file. Raises NotFound, InvalidArgument if it fails."""
    if not file.is_file():
        raise NotFound(f"there is no file '{file}' with operators", "check the path in --ops")
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)  # the file imports its neighbours, as a script does
    try:
        runpy.run_path(str(file), run_name=file.stem)
    except InvalidArgument:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        places = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == str(file)]
        line = f" ({file.name}:{places[-1].lineno})" if places else ""
        raise InvalidArgument(
            f"'{file.name}' raised {type(error).__name__}: {error}{line}", "correct the file given as --ops"
        ) from None
    finally:
        sys.path.remove(folder)
