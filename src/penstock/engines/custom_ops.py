"""Custom operators: ``@penstock.register_op`` defines an operator that converters, or ONNX Runtime, do not know.

Definitions come from the program, or from a file that the user names (``--ops``). A model or a bundle never loads any.
"""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, NotFound, PenstockError
from penstock.tensor import DataType

TENSORFLOW = "tf"
"""The namespace of TensorFlow's operators, which have none in TensorFlow."""
F = TypeVar("F", bound=Callable[..., Any])
Form = Literal["torch", "onnx", "python"]


class OperatorFailed(PenstockError):
    """An operator in Python raised an error, or returned other types than it declares."""


class CustomOp(msgspec.Struct, frozen=True):
    """A definition of an operator."""

    name: str
    """``namespace::operator`` or ``namespace::operator.overload``. In ONNX, the namespace is the domain."""
    function: Any
    form: Form
    inputs: tuple[DataType, ...] = ()
    """Only with form ``"python"``, like ``outputs``."""
    outputs: tuple[DataType, ...] = ()

    @property
    def domain(self) -> str:
        return self.name.partition("::")[0]

    @property
    def operator(self) -> str:
        return self.name.partition("::")[2]

    @property
    def code(self) -> Any:
        """The code of the function, which onnxscript wraps; None if it is not written in Python."""
        return getattr(inspect.unwrap(getattr(self.function, "function", self.function)), "__code__", None)

    @property
    def file(self) -> str:
        """The name of the file with the function; empty if unknown."""
        return Path(self.code.co_filename).name if self.code else ""


_registered: dict[str, CustomOp] = {}
_files: dict[str, None] = {}


def register_op(
    name: str, form: Form = "torch", *, inputs: Sequence[Any] = (), outputs: Sequence[Any] = ()
) -> Callable[[F], F]:
    """Register the decorated function as the definition of the operator ``name``, such as ``"my_library::clamp_norm"``. The
    namespace of TensorFlow's operators is ``tf``.

    The function takes the operator's arguments. With form ``"torch"``, it computes the operator from other torch operators. With form
    ``"onnx"``, it is a function of onnxscript, which the exporter calls with ONNX values. With form ``"python"``, it takes and returns
    numpy arrays of the types ``inputs`` and ``outputs``, such as ``["float32", "int64"]``; it is part of no model, so that the model
    runs only where the function is registered. A second definition is for models that are
    loaded later. Raises InvalidArgument.
    """
    if not isinstance(name, str) or name.count("::") != 1:
        raise InvalidArgument(
            f"register_op got the operator {name!r}", "name it as namespace::operator, as in torch.library"
        )
    if form not in get_args(Form):
        raise InvalidArgument(f"register_op got the form {form!r}", "use 'torch', 'onnx' or 'python'")
    if (form == "python") != bool(inputs and outputs) or (form != "python" and (inputs or outputs)):
        raise InvalidArgument(
            f"register_op got {len(inputs)} types of inputs and {len(outputs)} of outputs for '{name}' with the form '{form}'",
            "with form='python', and only then, give the types of all inputs and outputs, such as inputs=['float32']",
        )
    types = tuple(tuple(_type(name, one) for one in some) for some in (inputs, outputs))

    def register(function: F) -> F:
        _registered[name] = CustomOp(name, function, form, *types)
        return function

    return register


def _type(name: str, given: Any) -> DataType:
    try:
        datatype = DataType.from_numpy(np.dtype(given))
    except (TypeError, PenstockError):
        datatype = None
    if datatype is None or datatype in (
        DataType.FP16,
        DataType.BF16,
    ):  # onnxruntime-extensions ends the process for these types
        raise InvalidArgument(
            f"register_op got the type {given!r} for '{name}', which operators in Python cannot take or return",
            "use numpy's float32, float64, int8 to int64, uint8 to uint64, bool or str",
        )
    return datatype


def custom_ops(file: Path | None = None) -> tuple[CustomOp, ...]:
    """All registered operators, after running ``file``. Raises NotFound, InvalidArgument if the file fails."""
    if file is not None:
        run_file(file)
    return tuple(_registered.values())


def python_ops(model: bytes) -> tuple[CustomOp, ...]:
    """The registered operators in Python that may be in an ONNX ``model``."""
    return tuple(
        one
        for one in _registered.values()
        if one.form == "python" and one.domain.encode() in model and one.operator.encode() in model
    )


def files() -> tuple[str, ...]:
    """The files with operators that the user has named in this process. A child process that runs models runs them, too."""
    return tuple(_files)


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
        with suppress(Exception):  # the user's class of errors may be unable to say anything
            line = f": {error}{line}"
        raise InvalidArgument(
            f"'{file.name}' raised {type(error).__name__}{line}", "correct the file given as --ops"
        ) from None
    finally:
        with suppress(ValueError):  # the file may have changed the path
            sys.path.remove(folder)
    _files[str(file.resolve())] = None
