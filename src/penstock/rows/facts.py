"""Facts about a tensor that hold for every request: its shape, and its elements if they are shapes, axes or indices.

The batch axis of a tensor is the axis whose size is a multiple ``k`` of the batch size. Elements ``i*k`` to ``(i+1)*k - 1`` of this
axis depend only on row ``i`` of the inputs. The axis may run through all rows several times (``interleaved``). A tensor without a
batch axis is constant: it is the same for all requests that can be merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import numpy as np

from penstock.rows.graph import OnnxNode, OnnxTensor
from penstock.rows.sizes import Number, Size, depends_on_batch, result
from penstock.tensor import Array, DataType

Shape = tuple[Number, ...]

MAX_KNOWN = 256
"""Maximum number of elements to track. A larger tensor probably holds data, not shapes or axes."""


_KNOWN = {DataType.INT32, DataType.INT64, DataType.FP32, DataType.FP64, DataType.BOOL}
"""Only elements of these types are tracked. Arithmetic on other types could overflow."""


class Dependent(Exception):
    """The proof stops at ``node``, so rows may depend on each other. The error message is the node followed by ``reason``."""

    def __init__(self, reason: str, node: OnnxNode | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


def stop(reason: str) -> NoReturn:
    """Raise Dependent."""
    raise Dependent(reason)


class Fact:
    """The facts about a tensor; ``value`` holds a Number for each element, or is None if the elements are unknown.

    Raises Dependent if the batch size occurs in more than one axis, or in another way than as a factor.
    """

    __slots__ = ("_tensor", "_value", "axis", "shape")

    def __init__(self, shape: Iterable[Number], value: Array | None = None, tensor: OnnxTensor | None = None) -> None:
        self.shape: Shape = tuple(shape)
        self._value = value
        self._tensor = tensor
        self.axis = -1
        """The batch axis; -1 for a constant."""
        for axis, size in enumerate(self.shape):
            if size.__class__ is Size and size.batch:
                if size.batch > 1 or self.axis >= 0:
                    stop("computes a shape from the batch size that does not have one row for each input row")
                self.axis = axis

    @classmethod
    def of(cls, value: Array | Sequence[Number] | Number) -> Fact:
        """The facts about a constant with these elements, which are numbers or symbols."""
        array = np.asarray(value, object)
        return cls(array.shape, array)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_rows(self) -> bool:
        return self.axis >= 0

    @property
    def is_single(self) -> bool:
        """True if the tensor is a constant of one element."""
        return all(size == 1 for size in self.shape)

    @property
    def value(self) -> Array | None:
        tensor = self._tensor
        if tensor is not None:
            self._tensor = None
            is_small = tensor.datatype in _KNOWN and int(np.prod(tensor.dims, dtype=object)) <= MAX_KNOWN
            if is_small and (array := tensor.array()) is not None:
                self._value = np.asarray((array * 1).tolist(), object)
        return self._value

    @property
    def holds_batch_size(self) -> bool:
        """True if the elements depend on the batch size."""
        return self._value is not None and any(map(depends_on_batch, self._value.flat))


def broadcast(*shapes: Shape) -> Shape:
    """The shape of an element-wise operation. Raises Dependent if the operation mixes rows."""
    rank = max(map(len, shapes))
    return tuple(
        _meet([shape[axis - rank + len(shape)] for shape in shapes if axis >= rank - len(shape)])
        for axis in range(rank)
    )


def _meet(sizes: Sequence[Number]) -> Number:
    first = sizes[0]
    if all(size == first for size in sizes):
        return first
    others = list(dict.fromkeys(size for size in sizes if size != 1))
    if len(others) == 1:
        return others[0]
    if any(map(depends_on_batch, others)):
        stop("combines rows with other rows, or with a constant that has one element per row")
    known = [size for size in others if isinstance(size, int)]
    return known[0] if known else result("broadcast", *sorted(others, key=repr))


def join(first: Fact, second: Fact, unknown: Iterator[Number]) -> Fact:
    """The facts that hold for both tensors. An axis with two different sizes gets a new size from ``unknown``. Raises Dependent if no
    facts hold for both tensors.
    """
    if first.rank != second.rank or first.axis != second.axis or first.holds_batch_size or second.holds_batch_size:
        stop("can have outputs of different forms")
    shape = []
    for one, other in zip(first.shape, second.shape, strict=True):
        if one != other and (depends_on_batch(one) or depends_on_batch(other)):
            stop("can have outputs of different forms")
        shape.append(one if one == other else next(unknown))
    return Fact(shape)
