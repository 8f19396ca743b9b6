"""Reads and writes the bodies of ``:predict``: rows (``instances``, ``predictions``) or columns (``inputs``, ``outputs``). Pure.

A model's only input or output needs no name. A row contains one element of each tensor along the first dimension.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import InvalidArgument, shortened
from penstock.online.server.http.dialects.nested import is_named, read_object, to_array, to_value, write_json
from penstock.online.server.to_thread import Steps
from penstock.tensor import Array, Buffer, TensorSpec

SIGNATURE = "serving_default"
"""The name of a model's only signature."""


class PredictionForm(enum.Enum):
    """The form of a request and its response."""

    COLUMNS = enum.auto()
    ROWS = enum.auto()
    WHOLE = enum.auto()
    """A single row, for a model without a batch dimension."""


def read(body: Buffer, inputs: Sequence[TensorSpec], batchable: bool) -> Steps[tuple[dict[str, Array], PredictionForm]]:
    """The tensors by input name, and the form of the response. Raises InvalidArgument."""
    members = yield from read_object(body)
    check_signature(members)
    if "instances" in members and "inputs" in members:
        raise InvalidArgument("Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist")
    if "instances" in members:
        return _read_rows(members["instances"], inputs, batchable)
    if "inputs" not in members:
        raise InvalidArgument("Missing 'inputs' or 'instances' key")
    return read_columns(members["inputs"], inputs), PredictionForm.COLUMNS


def write(outputs: Mapping[str, Array], form: PredictionForm) -> bytes:
    """Encode a response. Raises InvalidArgument if the form requires rows but the first dimensions of the outputs differ."""
    values = {name: to_value(name, array) for name, array in outputs.items()}
    if form is PredictionForm.COLUMNS:
        return write_json({"outputs": unnamed(values)})
    if form is PredictionForm.WHOLE:
        return write_json({"predictions": [unnamed(values)]})
    rows = -1
    for name, array in outputs.items():
        if not array.ndim:
            raise InvalidArgument(f"Tensor name: {name} has no shape information", "send 'inputs' instead")
        if array.shape[0] != rows != -1:
            reason = f"has inconsistent batch size: {array.shape[0]} expecting {rows}"
            raise InvalidArgument(f"Tensor name: {name} {reason}", "send 'inputs' instead")
        rows = array.shape[0]
    if len(values) == 1:
        return write_json({"predictions": unnamed(values)})
    return write_json({"predictions": [{name: value[row] for name, value in values.items()} for row in range(rows)]})


def check_signature(members: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if ``signature_name`` is not the name of the only signature."""
    name = members.get("signature_name", "")
    if not isinstance(name, str):
        raise InvalidArgument("'signature_name' key must be a string value")
    if name not in ("", SIGNATURE):
        raise InvalidArgument(
            f'Serving signature key "{shortened(name)}" not found', f"the only signature is '{SIGNATURE}'"
        )


def read_columns(value: Any, inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """The tensors by input name. A single tensor may be unnamed. Raises InvalidArgument."""
    if not is_named(value):
        return {_only(inputs).name: to_array(_only(inputs), value)}
    specs = {spec.name: spec for spec in inputs}
    for name in value:
        if name not in specs:
            raise InvalidArgument(f"JSON object: does not have named input: {name}", f"the inputs are {list(specs)}")
    return {name: to_array(specs[name], one) for name, one in value.items()}


def unnamed(values: Mapping[str, Any]) -> Any:
    """The only value in ``values``, without its name. If there are several values, ``values`` unchanged."""
    return next(iter(values.values())) if len(values) == 1 else values


def _read_rows(rows: Any, inputs: Sequence[TensorSpec], batchable: bool) -> tuple[dict[str, Array], PredictionForm]:
    if not isinstance(rows, list | np.ndarray) or not len(rows):
        raise InvalidArgument("Expecting 'instances' to be a list of at least one value")
    named = is_named(rows[0])
    for number, row in enumerate(rows if isinstance(rows, list) else ()):
        if is_named(row) != named or (named and row.keys() != rows[0].keys()):
            raise InvalidArgument(
                f"Failed to process element: {number} of 'instances' list: its form differs from the first element's"
            )
    columns = {name: [row[name] for row in rows] for name in rows[0]} if named else rows
    arrays = read_columns(columns, inputs)
    ranks = {spec.name: len(spec.shape) for spec in inputs}
    if batchable or any(array.ndim != ranks[name] + 1 for name, array in arrays.items()):
        return arrays, PredictionForm.ROWS
    if len(rows) > 1:
        raise InvalidArgument(
            "the model has no batch dimension, but 'instances' has several values", "send one value, or send 'inputs'"
        )
    return {name: array.reshape(array.shape[1:]) for name, array in arrays.items()}, PredictionForm.WHOLE


def _only(inputs: Sequence[TensorSpec]) -> TensorSpec:
    if len(inputs) != 1:
        names = [spec.name for spec in inputs]
        raise InvalidArgument("a plain value or list requires a model with one input", f"send an object with {names}")
    return inputs[0]
