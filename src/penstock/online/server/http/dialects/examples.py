"""Reads and writes the bodies of ``:classify`` and ``:regress``: lists of examples, and lists with a result per example. Pure.

An example is a JSON object of features. A feature is a value or a flat list. It is one row of the input with the same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import InvalidArgument
from penstock.online.server.http.dialects.nested import read_object, to_array, to_value, write_json
from penstock.online.server.http.dialects.predictions import check_signature
from penstock.online.server.to_thread import Steps
from penstock.tensor import Array, Buffer, DataType, TensorSpec

_ASK = "ask with ':predict'"


def read(body: Buffer, inputs: Sequence[TensorSpec]) -> Steps[dict[str, Array]]:
    """The tensors by input name. Features that are not inputs are ignored. Raises InvalidArgument."""
    members = yield from read_object(body)
    check_signature(members)
    context, examples = members.get("context", {}), members.get("examples")
    if not isinstance(examples, list) or not examples:
        raise InvalidArgument("Expecting 'examples' to be a list of at least one object")
    for example in (context, *examples):
        if not isinstance(example, dict):
            raise InvalidArgument("Example must be JSON object", "'context' and each of 'examples' must be objects")
    return {spec.name: _read_feature(spec, context, examples) for spec in inputs}


def write_classes(outputs: Mapping[str, Array], labels: Mapping[str, Sequence[str]]) -> bytes:
    """Encode a list of ``[label, score]`` pairs for each example.

    If no output contains labels, the labels come from the model's configuration. A class without a label gets its number as the
    label. Raises InvalidArgument if the outputs are not classes and scores.
    """
    scores = _find(outputs, "scores", is_text=False)
    classes = _find(outputs, "classes", is_text=True)
    if not scores or outputs[scores].ndim != 2 or (classes and outputs[classes].shape != outputs[scores].shape):
        raise InvalidArgument("the outputs are not a classification, i.e. scores [batch, classes] and labels", _ASK)
    values = to_value(scores, outputs[scores])
    if classes:
        names: Any = to_value(classes, outputs[classes])
    else:
        known = labels.get(scores, ())
        names = [[*known, *map(str, range(len(known), values.shape[1]))]] * len(values)
    results = [list(zip(*row, strict=False)) for row in zip(names, values, strict=True)]
    return write_json({"results": results})


def write_values(outputs: Mapping[str, Array]) -> bytes:
    """Encode one number per example. Raises InvalidArgument unless an output is a float tensor, ``[batch]`` or ``[batch, 1]``."""
    name = _find(outputs, "outputs", is_text=False)
    if not name or outputs[name].ndim not in (1, 2) or outputs[name].shape[1:] not in ((), (1,)):
        raise InvalidArgument("the outputs are not a regression, i.e. floats [batch] or [batch, 1]", _ASK)
    return write_json({"results": to_value(name, outputs[name].reshape(-1))})


def _read_feature(spec: TensorSpec, context: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> Array:
    rows = []
    for number, example in enumerate(examples):
        feature = example.get(spec.name, context.get(spec.name))
        if feature is None:
            raise InvalidArgument(f"neither example {number} nor the context has a feature '{spec.name}'")
        row = feature if isinstance(feature, list | np.ndarray) else [feature]
        if isinstance(row, np.ndarray):
            row = row.astype(np.int64) if row.dtype == np.bool_ and spec.datatype is not DataType.BOOL else row
        elif spec.datatype not in (DataType.BOOL, DataType.BYTES):
            # TensorFlow's Example has no booleans.
            row = [int(value) if isinstance(value, bool) else value for value in row]
        rows.append(row)
    array = to_array(spec, rows)
    try:
        if array.ndim == 2:
            return array.reshape(len(rows), *spec.shape[1:])
    except ValueError:
        pass
    hint = "a feature is a value or a flat list, with as many values as the input has in a row"
    raise InvalidArgument(f"feature '{spec.name}' does not fit an input of shape {list(spec.shape)}", hint)


def _find(outputs: Mapping[str, Array], name: str, is_text: bool) -> str:
    """The output called ``name``, or otherwise the only text output or the only other output. Empty if there is no such output."""
    kinds = {one: DataType.from_numpy(array.dtype) for one, array in outputs.items()}
    found = [one for one, kind in kinds.items() if (kind is DataType.BYTES if is_text else kind.is_float)]
    return name if name in found else found[0] if len(found) == 1 else ""
