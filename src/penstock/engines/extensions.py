"""Operators in Python: ONNX Runtime calls functions of ``register_op`` through onnxruntime-extensions, which only this file imports.

onnxruntime-extensions ends the process if a function raises an error, and converts values of other types than the declared ones. So
the functions are called here: if one fails, the operator returns zeros, the run is terminated, and ``reporting`` raises the error.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime_extensions import PyCustomOpDef, get_library_path
from onnxruntime_extensions._extensions_pydll import add_custom_op  # `onnx_op` would call the function unguarded

from penstock.engines.custom_ops import CustomOp, OperatorFailed
from penstock.errors import PenstockError
from penstock.tensor import Array, DataType, as_bytes

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
    error: BaseException | None = None


_run = _Run()


def library(operators: Iterable[CustomOp]) -> str:
    """The path of the library with ``operators``, to register with the options of a session."""
    with _lock:
        for one in operators:
            key = (one.name, one.inputs, one.outputs)
            if key in _defined:
                _operators[_defined[key]] = one
                continue
            _defined[key] = len(_operators)
            _operators.append(one)
            made = PyCustomOpDef()
            made.op_type, made.obj_id, made.attrs = one.name, _defined[key], {}
            made.input_types, made.output_types = map(_kinds, (one.inputs, one.outputs))
            _definitions.append(made)
            add_custom_op(made)
        PyCustomOpDef.install_hooker(_called)  # a program that uses onnxruntime-extensions itself may have replaced it
    return str(get_library_path())


@contextlib.contextmanager
def reporting(options: ort.RunOptions) -> Iterator[None]:
    """Raise the error of a function that fails in a run with ``options`` within the block."""
    before, _run.options, _run.error = (_run.options, _run.error), options, None
    error: BaseException | None = None
    try:
        yield
    except PenstockError:
        if _run.error is None:
            raise
    finally:
        error, (_run.options, _run.error) = _run.error, before
    if error is not None:
        options.terminate = False  # it means that a time limit has passed
        raise error


def _kinds(types: Sequence[DataType]) -> list[int]:
    return [getattr(PyCustomOpDef, _KINDS.get(one, f"dt_{one.dtype.name}")) for one in types]


def _called(number: int, inputs: Sequence[Array], attributes: object) -> tuple[object, ...]:
    """Called by the library: the number, then shape and elements of every output. It must not raise."""
    one = _operators[number]
    try:
        outputs = _outputs(one, one.function(*inputs))
    except BaseException as error:  # noqa: BLE001 - `reporting` raises it
        _run.error = error if isinstance(error, KeyboardInterrupt | PenstockError) else _failure(one, error)
        if _run.options is not None:
            _run.options.terminate = True
        shape = inputs[0].shape if inputs else ()
        outputs = [np.zeros(shape, np.str_ if kind is DataType.BYTES else kind.dtype) for kind in one.outputs]
    return number, *(part for array in outputs for part in (array.shape, array.reshape(-1).tolist()))


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
    return text.reshape(array.shape)


def _failure(one: CustomOp, error: BaseException) -> OperatorFailed:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if one.code and frame.filename == one.code.co_filename]
    raised = f"the operator '{one.name}' raised {type(error).__name__}: {error}"
    return OperatorFailed(raised + _place(one, lines[-1] if lines else None), "correct the function, or the inputs")


def _place(one: CustomOp, line: int | None = None) -> str:
    return f" ({one.file}:{line or one.code.co_firstlineno})" if one.code else ""
