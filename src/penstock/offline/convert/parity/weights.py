"""Finds weights of an ONNX model that are almost those of its source. Sums of many products hide a wrong one.

A weight of the source may have another layout or type in the model, or be folded into another one. So a tensor of the model counts as
altered only in two cases:

1. It has the name and the shape of a weight, but not the values. A folded batch normalisation, which keeps the name, multiplies rows
   and changes biases.
2. It equals no weight, but at least half of the values of one, and the others differ by at most 1 %. Values that the source itself
   computes from weights, such as those of a weight normalisation, are no such tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.offline.convert.base import Exported, FrameworkModel
from penstock.offline.convert.certificate import Divergence
from penstock.offline.convert.parity.compare import statistics
from penstock.offline.convert.parity.nodes import Nodes
from penstock.tensor import Array

_LEAST_VALUES = 4
"""Smallest number of different equal values that cannot be equal by chance."""
_NEAR = 0.01
_FOLDED = 1e-5
"""Relative rounding error of a factor of a row."""
_STATISTIC = "running_var"
"""Part of the name of a weight of batch normalisations."""


def altered_weight(nodes: Nodes, source: FrameworkModel, exported: Exported) -> Divergence | None:
    """The first tensor of the model that is an altered weight."""
    names = exported.weights
    left = {name: array for name, array in nodes.constants.items() if array.dtype.kind in "fiub" and array.size > 1}
    prints = {name: _fingerprint(array) for name, array in left.items()} if names else {}
    for weight in names if left else ():
        for array in source.values({}, [weight]).values():
            seen = _fingerprint(array)
            left = {name: one for name, one in left.items() if prints[name] != seen}
    sizes = {array.size for array in left.values()}
    may_fold = any(_STATISTIC in name for name in names)
    for weight in names if left else ():
        for array in source.values({}, [weight]).values():
            for name, ours in left.items() if array.size in sizes else ():
                groups = _groups(nodes, name) if may_fold else ()
                if ours.dtype != array.dtype or not _is_altered(ours, array, is_named=name == weight, groups=groups):
                    continue
                if name == weight or not _is_computed(ours, source, exported.computed):
                    return _divergence(nodes, name, weight, ours, array)
    return None


def _groups(nodes: Nodes, name: str) -> tuple[int, ...]:
    """The numbers of groups of the transposed convolutions with the weight ``name``, and 1."""
    readers = [node for node in nodes.proto.graph.node if node.op_type == "ConvTranspose" and name in node.input[1:2]]
    return (1, *(one.i for node in readers for one in node.attribute if one.name == "group" and one.i > 1))


def _is_computed(ours: Array, source: FrameworkModel, computed: Sequence[str]) -> bool:
    """True if the source computes these values, in any order, up to rounding."""
    for name in computed:
        for array in source.values({}, [name]).values():
            if array.size == ours.size and array.dtype == ours.dtype:
                one, other = np.sort(ours, None).astype(float), np.sort(array, None).astype(float)
                if np.allclose(one, other, rtol=_FOLDED, atol=_FOLDED**2, equal_nan=True):
                    return True
    return False


def _fingerprint(array: Array) -> tuple[object, ...]:
    """Equal for two arrays that have the same values in any order."""
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").astype(np.uint64)
    return array.dtype.name, array.size, int(bits.sum()), int((bits * bits).sum())


def _is_altered(ours: Array, theirs: Array, *, is_named: bool, groups: Sequence[int]) -> bool:
    """``groups`` are empty if no batch normalisation can have been folded."""
    if is_named and ours.shape == theirs.shape:
        is_folded = ours.dtype.kind == "f" and any(_is_folded(ours, theirs, one) for one in groups)
        return not np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f") and not is_folded
    return ours.dtype.kind == "f" and any(_is_near(ours, one) for one in _layouts(theirs, ours.shape))


def _layouts(array: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    if array.size == np.prod(shape):
        yield array.reshape(shape)
        if array.T.shape == shape:
            yield array.T


def _is_near(ours: Array, theirs: Array) -> bool:
    differs = ours != theirs
    same = ours[~differs & (ours != 0)]
    if not 0 < np.count_nonzero(differs) <= same.size or np.unique(same).size < _LEAST_VALUES:
        return False
    change = np.abs(ours[differs].astype(np.float64) - theirs[differs])
    return bool((change <= _NEAR * np.abs(theirs[differs])).all())


def _is_folded(ours: Array, theirs: Array, groups: int) -> bool:
    """True if each row or each column is a multiple of the weight's, or if the weight is a bias, which becomes any other one.

    A transposed convolution has a column of its own for each group of rows.
    """
    if groups > 1:
        ours, theirs = (np.concatenate(np.split(each, groups), axis=1) for each in (ours, theirs))
    for axis in range(2 if ours.ndim > 1 else 0):
        one, other = (np.moveaxis(each, axis, 0).reshape(each.shape[axis], -1).astype(float) for each in (ours, theirs))
        factors = (one * other).sum(1, keepdims=True) / np.maximum((other * other).sum(1, keepdims=True), 1e-300)
        if np.allclose(one, factors * other, rtol=_FOLDED, atol=_FOLDED * np.abs(one).max()):
            return True
    return ours.ndim == 1


def _divergence(nodes: Nodes, name: str, weight: str, ours: Array, theirs: Array) -> Divergence:
    readers = [nodes.label(index) for index, reads in enumerate(nodes.reads) if name in reads]
    error = np.abs(np.sort(ours, None).astype(np.float64) - np.sort(theirs, None)).max()
    return Divergence(
        node=", ".join(readers) or name,
        source=weight,
        error=float(error / (np.abs(theirs).max() or 1.0)),
        where=f"the weight '{name}' has other values",
        expected=statistics(theirs),
        found=statistics(ours),
    )
