"""The classification extension, which returns the greatest values of an output, each as a text with its index and label. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.errors import InvalidArgument
from penstock.online.repository.handle import Handle
from penstock.online.server.to_thread import Steps, beside, finish
from penstock.request import InferResponse
from penstock.tensor import Array, DataType

_PIECE = 4 << 10
_CLASS_BYTES = 80
"""Bytes of memory that one class in a result takes, without its label."""
_WITHOUT_CLASSES = frozenset({DataType.BYTES, DataType.FP16, DataType.BF16})


def classify_outputs(response: InferResponse, counts: Mapping[str, int], handle: Handle) -> None:
    """Replace each output in ``counts`` with that number of its greatest values. ``handle`` is the model version that answered.

    Raises InvalidArgument.
    """
    finish(classify_in_steps(response, counts, handle))


def classify_in_steps(response: InferResponse, counts: Mapping[str, int], handle: Handle) -> Steps[None]:
    """Like ``classify_outputs``, but in short steps, for large outputs."""
    held = 0
    for name, count in counts.items():
        if name in response.outputs:
            labels = handle.labels.get(name, ())
            steps = _classify(name, response.outputs[name], count, handle.signature.batchable, labels)
            response.outputs[name] = yield from beside(held, steps)
            held += _CLASS_BYTES * response.outputs[name].size


def classify(name: str, array: Array, count: int, batched: bool, labels: Sequence[str] = ()) -> Array:
    """The ``count`` (>= 1) greatest of the n values in descending order, as BYTES ``value:index`` or ``value:index:label``.

    The shape is ``[min(count, n)]``, or ``[batch, min(count, n)]`` if the first axis of ``array`` is the batch. Floats are written
    as with C's ``%f``. Equal values are ordered by index. NaN comes last. Raises InvalidArgument for BYTES, FP16 and BF16.
    """
    return finish(_classify(name, array, count, batched, labels))


def _classify(name: str, array: Array, count: int, batched: bool, labels: Sequence[str]) -> Steps[Array]:
    datatype = DataType.from_numpy(array.dtype)
    if datatype in _WITHOUT_CLASSES:
        raise InvalidArgument(
            f"output '{name}' of datatype {datatype.value} cannot be classified", "request its values instead"
        )
    rows = array.shape[0] if batched and array.ndim else 1
    # numpy cannot infer the other axis of an empty array.
    table = array.reshape(rows, array.size // rows if rows else 0)
    yield 2 * array.nbytes + 3 * array.size * np.dtype(np.intp).itemsize
    # Both expressions reverse the order of the values without overflow.
    keys = -table if datatype.is_float else ~table
    order = np.argsort(keys, axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(table, order, axis=1)
    form = "%f:%d" if datatype.is_float else "%d:%d"
    classes = np.empty(order.size, np.object_)
    for start in range(0, order.size, _PIECE):
        part = slice(start, start + _PIECE)
        yield values.nbytes + order.nbytes + classes.nbytes + _CLASS_BYTES * min(start + _PIECE, order.size)
        classes[part] = [
            (f"{text}:{labels[index]}" if index < len(labels) else text).encode()
            for text, index in (
                (form % (value, index), index)
                for value, index in zip(values.ravel()[part].tolist(), order.ravel()[part].tolist(), strict=True)
            )
        ]
    return classes.reshape(order.shape if batched and array.ndim else order.shape[1:])
