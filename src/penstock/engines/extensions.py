"""Operators in Python: ONNX Runtime calls functions of ``register_op`` through onnxruntime-extensions, which only this file imports.

onnxruntime-extensions ends the process if a function raises an error, and takes values of other types as the declared ones. So the
functions are called here: if one fails, the operator returns zeros, the run is terminated, and ``reporting`` raises the error.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime as ort

from penstock.engines.custom_ops import CustomOp, OperatorFailed, custom_ops
from penstock.errors import InvalidArgument, PenstockError
from penstock.tensor import Array, DataType, as_bytes

with patch.dict(os.environ):  # the package sets a variable that would make child processes use protobuf in Python
    from onnxruntime_extensions import PyCustomOpDef, get_library_path
    from onnxruntime_extensions._extensions_pydll import add_custom_op  # `onnx_op` would call the function unguarded

_KINDS = {DataType.FP32: "dt_float", DataType.FP64: "dt_double", DataType.BYTES: "dt_string"}
"""The types whose names differ from numpy's."""
_defined: dict[tuple[object, ...], int] = {}
"""The number of each definition in onnxruntime-extensions, by name and types. They can be neither changed nor removed there."""
_operators: list[CustomOp] = []
"""The operators by these numbers."""
_definitions: list[Any] = []
_lock = threading.Lock()


class _Run(threading.local):
    """The run of this thread. A session without parallel execution calls operators in the thread of the run."""

    options: ort.RunOptions | None = None
    functions: Mapping[int, CustomOp] = {}
    error: BaseException | None = None


_run = _Run()


def library(needed: Iterable[CustomOp]) -> tuple[str, dict[int, CustomOp]]:
    """The path of the library with all registered operators, to add to the options of a session that needs some of them, and the
    operators by their numbers. The session keeps these, whatever other files or programs define later.

    Raises InvalidArgument for an operator whose namespace has been used before. onnxruntime-extensions keeps the operators of a
    namespace in one vector, and sessions keep pointers into it, which a new element would invalidate.
    """
    wanted = {_key(one) for one in needed}
    with _lock:
        used = {operator.domain for operator in _operators}
        for one in (each for each in custom_ops() if each.form == "python"):
            key = _key(one)
            if key in _defined:
                _operators[_defined[key]] = one
            elif one.domain not in used:
                _add(one)
            elif key in wanted:
                raise InvalidArgument(
                    f"'{one.name}' was registered after a model with operators of '{one.domain}' had been loaded",
                    "register all operators of a namespace, with their final types, before the first model is loaded",
                )
        PyCustomOpDef.install_hooker(_called)  # a program that uses onnxruntime-extensions itself may have replaced it
        return str(get_library_path()), dict(enumerate(_operators))


def _key(one: CustomOp) -> tuple[object, ...]:
    return one.name, one.inputs, one.outputs


def _add(one: CustomOp) -> None:
    _defined[_key(one)] = len(_operators)
    made = PyCustomOpDef()
    made.op_type, made.obj_id, made.attrs = one.name, len(_operators), {}
    made.input_types, made.output_types = map(_kinds, (one.inputs, one.outputs))
    _operators.append(one)
    _definitions.append(made)
    add_custom_op(made)


@contextlib.contextmanager
def reporting(options: ort.RunOptions, functions: Mapping[int, CustomOp]) -> Iterator[None]:
    """Call ``functions`` in a run with ``options`` within the block, and raise the error of one that fails."""
    before = _run.options, _run.functions, _run.error
    _run.options, _run.functions, _run.error = options, functions, None
    error: BaseException | None = None
    try:
        yield
    except PenstockError:
        if _run.error is None:
            raise
    finally:
        error, (_run.options, _run.functions, _run.error) = _run.error, before
    if error is not None:
        options.terminate = False  # it means that a time limit has passed
        raise error


def _kinds(types: Sequence[DataType]) -> list[int]:
    return [getattr(PyCustomOpDef, _KINDS.get(one, f"dt_{one.dtype.name}")) for one in types]


def _called(number: int, inputs: Sequence[Array], attributes: object) -> tuple[object, ...]:
    """Called by the library: the number, then shape and elements of every output. It must not raise."""
    one = _run.functions.get(number) or _operators[number]
    try:
        outputs = _outputs(one, one.function(*inputs))
    except BaseException as error:
        _run.error = error if isinstance(error, KeyboardInterrupt | PenstockError) else _failure(one, error)
        if _run.options is not None:
            _run.options.terminate = True
        shape = inputs[0].shape if inputs else ()
        outputs = [
            _text(np.zeros(shape, np.str_)) if kind is DataType.BYTES else np.zeros(shape, kind.dtype)
            for kind in one.outputs
        ]
    return number, *(part for array in outputs for part in (array.shape, _elements(array)))


def _elements(array: Array) -> Any:
    """The library copies the memory of an array whose elements have the right size, so it must be contiguous."""
    return array.reshape(-1).tolist() if array.dtype.hasobject else np.asarray(array, order="C")


def _outputs(one: CustomOp, found: Any) -> list[Array]:
    """The arrays that the function returned. Raises OperatorFailed if they are not what it declares."""
    arrays = [np.asarray(result) for result in (found if isinstance(found, tuple | list) else [found])]
    kinds = [np.dtype(np.object_) if array.dtype.kind in "SU" else array.dtype for array in arrays]
    if kinds != [kind.dtype for kind in one.outputs]:
        told, wanted = ", ".join(map(str, kinds)), ", ".join(kind.value for kind in one.outputs)
        raise OperatorFailed(
            f"the operator '{one.name}' returned {told}, but declares {wanted}{_place(one)}",
            "return arrays of the types that are given to register_op as outputs",
        )
    return [_text(array) if array.dtype.kind in "OS" else array for array in arrays]


def _text(array: Array) -> Array:
    text = np.empty(array.size, np.object_)
    text[:] = [as_bytes(element).decode() for element in array.reshape(-1).tolist()]
    if any("\0" in element for element in text):
        raise ValueError("an element contains a zero byte, at which ONNX Runtime would cut it")
    return text.reshape(array.shape)


def _failure(one: CustomOp, error: BaseException) -> OperatorFailed:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if one.code and frame.filename == one.code.co_filename]
    raised = f"the operator '{one.name}' raised {type(error).__name__}"
    with contextlib.suppress(BaseException):  # the user's class of errors may be unable to say anything
        raised += f": {error}"
    return OperatorFailed(raised + _place(one, lines[-1] if lines else None), "correct the function, or the inputs")


def _place(one: CustomOp, line: int | None = None) -> str:
    return f" ({one.file}:{line or one.code.co_firstlineno})" if one.code else ""
