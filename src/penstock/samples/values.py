"""Check the arrays of samples against the inputs of a model, and convert Python values to arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import InvalidData
from penstock.samples.hints import InputHints
from penstock.tensor import Array, DataType, TensorSpec

_ROWS = 256
"""Number of samples to check at a time, which limits the memory of the check."""
_MAX_CODE = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_RAGGED = "give lists of equal lengths"


def typed(spec: TensorSpec, array: Array) -> Array:
    """``array`` with the datatype of ``spec``. Only the byte order and the form of text are converted. Raises InvalidData."""
    # npy files have no name for bfloat16, so numpy reads the elements as 16-bit void.
    if spec.datatype is DataType.BF16 and array.dtype.str[1:] == "V2":
        array = array.view(spec.datatype.dtype)
    if not _holds(array, spec.datatype):
        raise InvalidData(
            f"input '{spec.name}' is {spec.datatype.value}, but the data is {array.dtype}",
            f"save it as {'text' if spec.datatype is DataType.BYTES else spec.datatype.dtype}",
        )
    if array.dtype.kind == "U" and array.dtype.itemsize:
        codes = np.ascontiguousarray(array).view(np.dtype("u4").newbyteorder(array.dtype.byteorder))
        if ((codes > _MAX_CODE) | (codes - _SURROGATES.start < len(_SURROGATES))).any():
            raise InvalidData(f"input '{spec.name}' contains text that is not valid Unicode", "save it again as text")
    return array.astype(spec.datatype.dtype, copy=False)


def check_finite(spec: TensorSpec, samples: Array, hints: InputHints | None = None) -> None:
    """Raise InvalidData if an element of ``samples``, whose first axis counts samples, is NaN or infinite.

    NaN is valid in inputs that take missing values according to ``hints``.
    """
    if not spec.datatype.is_float or not len(samples):
        return
    takes_missing = hints is not None and spec.name in hints.missing
    bad = np.concatenate([not_finite(samples[at : at + _ROWS]) for at in range(0, len(samples), _ROWS)])
    if takes_missing and bad.any():
        bad = np.concatenate([_infinite(samples[at : at + _ROWS]) for at in range(0, len(samples), _ROWS)])
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        where = f" in {int(bad.sum())} of {len(bad)} samples, first in sample {first}" if len(bad) > 1 else ""
        raise InvalidData(
            f"input '{spec.name}' contains NaN or infinity{where}", "remove these samples, or replace the values"
        )


def not_finite(rows: Array) -> Array:
    """For each row, True if an element is NaN or infinite."""
    return np.asarray(~np.isfinite(rows.reshape(len(rows), -1)).all(axis=1))


def _infinite(rows: Array) -> Array:
    return np.asarray(np.isinf(rows.reshape(len(rows), -1)).any(axis=1))


def check_labels(labels: Array) -> Array:
    """Labels with one row per sample, of numbers or text; a second axis of length 1 is dropped. Raises InvalidData."""
    flat = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if flat.ndim == 0 or 0 in flat.shape[1:] or flat.dtype.kind not in "iufbSU":
        raise InvalidData(
            f"labels must be numbers or text, one row per sample, but have shape {list(labels.shape)} and type {labels.dtype}",
            "omit labels if there are none",
        )
    if flat.dtype.kind == "f" and not_finite(flat).any():
        raise InvalidData("labels contain NaN or infinity", "remove these samples, or replace the values")
    if flat.ndim == 1 and flat.dtype.kind == "i" and flat.min(initial=0) < 0:
        first = int(np.flatnonzero(flat < 0)[0])
        raise InvalidData(
            f"labels must not be negative, because classes are numbered from 0, but the label at index {first} is {flat[first]}",
            "remove samples whose label is padding, number the classes from 0, or save the numbers of a regression as floats",
        )
    return flat


def from_python(spec: TensorSpec, value: Any) -> Array:
    """``value`` as an array: an array as it is, or numbers, text and nested lists of them in the datatype of ``spec``.

    Integers count as floats too, but no number counts as text, and no float as an integer. Raises InvalidData.
    """
    if hasattr(value, "__array__"):
        return np.asarray(value)
    datatype, name = spec.datatype, spec.name
    try:
        found = np.array(value, object) if datatype is DataType.BYTES else np.array(value)
    except (ValueError, OverflowError):
        raise InvalidData(f"input '{name}' has lists of different lengths, or nested too deep", _RAGGED) from None
    kinds = "iuf" if datatype.is_float else "b" if datatype is DataType.BOOL else "iu"
    elements = found.reshape(-1).tolist() if found.dtype.kind not in kinds and found.size else []
    wrong = [one for one in elements if datatype is not DataType.BYTES or not isinstance(one, str | bytes)]
    if wrong:
        is_list = isinstance(wrong[0], list)
        kind = "a list in a list of another length" if is_list else f"{type(wrong[0]).__name__} {wrong[0]!r}"
        raise InvalidData(f"input '{name}' is {datatype.value}, but the data contain {kind[:60]}", _fix(datatype))
    if found.dtype.kind in "iu" and not datatype.is_float and datatype is not DataType.BYTES and found.size:
        limits = np.iinfo(datatype.dtype)
        if found.min() < limits.min or found.max() > limits.max:
            raise InvalidData(
                f"input '{name}' is {datatype.value}, but the data go from {found.min()} to {found.max()}",
                f"{datatype.value} holds {limits.min} to {limits.max}",
            )
    with np.errstate(over="ignore"):  # the check for infinity finds what does not fit
        return found.astype(datatype.dtype)


def _fix(datatype: DataType) -> str:
    if datatype is DataType.BYTES:
        return "give text"
    if datatype is DataType.BOOL:
        return "give true or false"
    return "give numbers" if datatype.is_float else "give whole numbers"


def _holds(array: Array, datatype: DataType) -> bool:
    """True if the elements of ``array`` have type ``datatype``, in any byte order; text counts as BYTES."""
    if datatype is DataType.BYTES:
        return array.dtype.kind in "OSU"
    return array.dtype.newbyteorder("=") == datatype.dtype
