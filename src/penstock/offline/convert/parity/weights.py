"""Finds constants of an ONNX model that are almost those of its source. Sums of many products hide a wrong value, and a call reads only
some rows of a table.

The source gives its weights, and the values that it computes from weights alone, which exporters fold into constants. A constant of
the model is explained if it equals one of them, in any order of the axes: exactly a weight, and up to rounding a computed value. A
constant that is not explained is altered in these cases:

1. It has the name and the shape of a weight. A folded batch normalisation, which keeps the name, multiplies rows and changes biases.
2. It equals at least half of a weight, in some order of the axes. If the computed values are unknown, the other values must also
   differ by at most 1 %, because the exporter may have computed them.
3. It equals at least three quarters of a computed value, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.offline.convert.base import Exported, FrameworkModel
from penstock.offline.convert.certificate import Divergence
from penstock.offline.convert.parity.compare import statistics
from penstock.offline.convert.parity.layouts import differences, is_folded, is_same, layouts
from penstock.offline.convert.parity.nodes import Nodes
from penstock.tensor import Array

_LEAST_VALUES = 4
"""Smallest number of different equal values that cannot be equal by chance."""
_NEAR = 0.01
_STATISTICS = ("running_var", "moving_variance", "FusedBatchNorm", "batch_norm")
"""Parts of the names of weights of batch normalisations."""
_ASKED = 16
"""Number of values that the source is asked for at once."""


def altered_weight(nodes: Nodes, source: FrameworkModel, exported: Exported) -> Divergence | None:
    """The first constant of the model that is altered."""
    if not exported.weights:
        return None
    left = {name: array for name, array in nodes.stored.items() if array.dtype.kind in "fiub" and array.size > 1}
    for name, theirs, is_exact in _values(source, exported):
        same = [one for one, ours in left.items() if ours.size == theirs.size and ours.dtype == theirs.dtype]
        # Prefer the constant with the same name: another one can only be equal by chance, as tables of ones are.
        for one in same:
            if is_same(left[one], theirs, is_exact=is_exact) and not _is_moved(left[one], theirs, is_named=one == name):
                del left[one]
    kinds = {(array.size, array.dtype) for array in left.values()}
    may_fold = any(part in name for name in exported.weights for part in _STATISTICS)
    limit = _NEAR if exported.computed is None else np.inf
    for name, theirs, is_exact in _values(source, exported) if left else ():
        for one, ours in left.items() if (theirs.size, theirs.dtype) in kinds else ():
            if ours.size != theirs.size or ours.dtype != theirs.dtype:
                continue
            if is_exact and one == name and ours.shape == theirs.shape:
                groups = _groups(nodes, one) if may_fold else ()
                if not (ours.dtype.kind == "f" and any(is_folded(ours, theirs, each) for each in groups)):
                    return _divergence(nodes, one, name, ours, theirs)
            elif ours.dtype.kind == "f" and _is_near(ours, theirs, limit, is_exact=is_exact):
                return _divergence(nodes, one, name, ours, theirs)
    return None


def _values(source: FrameworkModel, exported: Exported) -> Iterator[tuple[str, Array, bool]]:
    """The weights and the computed values; true for the weights, which must be equal exactly."""
    for names, is_exact in ((exported.weights, True), (exported.computed or (), False)):
        for start in range(0, len(names), _ASKED):
            for name, array in source.values({}, names[start : start + _ASKED]).items():
                if array.size > 1:
                    yield name, array, is_exact


def _is_moved(ours: Array, theirs: Array, *, is_named: bool) -> bool:
    """True if the constant has the name and the shape of the weight, but its axes in another order."""
    return is_named and ours.shape == theirs.shape and not is_same(ours.reshape(-1), theirs.reshape(-1), is_exact=False)


def _groups(nodes: Nodes, name: str) -> tuple[int, ...]:
    """The numbers of groups of the transposed convolutions with the weight ``name``, and 1."""
    readers = [node for node in nodes.proto.graph.node if node.op_type == "ConvTranspose" and name in node.input[1:2]]
    return (1, *(one.i for node in readers for one in node.attribute if one.name == "group" and one.i > 1))


def _is_near(ours: Array, theirs: Array, limit: float, *, is_exact: bool) -> bool:
    """True if most values are equal, and the others differ by at most ``limit``, relative to the weight's."""
    flat = ours.reshape(-1)
    for laid in layouts(theirs, flat):
        differs = differences(flat, laid, is_exact=is_exact)
        count, same = np.count_nonzero(differs), flat[~differs & (flat != 0)]
        if not 0 < count <= (same.size if is_exact else flat.size // 4) or np.unique(same).size < _LEAST_VALUES:
            continue
        change = np.abs(flat[differs].astype(np.float64) - laid[differs])
        if limit == np.inf or not is_exact or bool((change <= limit * np.abs(laid[differs])).all()):
            return True
    return False


def _divergence(nodes: Nodes, name: str, weight: str, ours: Array, theirs: Array) -> Divergence:
    readers: Sequence[str] = [nodes.label(index) for index, reads in enumerate(nodes.reads) if name in reads]
    laid = theirs.reshape(ours.shape) if ours.shape == theirs.shape else None
    one, other = (ours, laid) if laid is not None else (np.sort(ours, None), np.sort(theirs, None))
    error = np.abs(one.astype(np.float64) - other).max()
    return Divergence(
        node=", ".join(readers) or name,
        source=weight,
        error=float(error / (np.abs(theirs).max() or 1.0)),
        where=f"the weight '{name}' has other values",
        expected=statistics(theirs),
        found=statistics(ours),
    )
