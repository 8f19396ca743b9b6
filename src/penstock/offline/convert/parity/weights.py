"""Finds constants of an ONNX model that are almost those of its source.

Sums of many products hide a wrong value, and calls read only some rows of a table.

The source gives its weights, and the values that it computes from weights alone, which exporters fold into constants. A constant of
the model is explained if it equals one of them, in any order of the axes: exactly a weight, and up to rounding a computed value. A
constant that is not explained is altered in these cases:

1. It has the name and the shape of a weight, unless a batch normalisation of the source explains the change. Exporters fold it into
   the layer before, whose weight and bias keep their names.
2. It equals at least half of a weight, in some order of the axes. If the computed values are unknown, the other values must also
   differ by at most 1 %, because the exporter may have computed them.
3. It equals at least three quarters of a computed value, up to rounding.
4. It has integers, and equals nearly all of a weight or computed value, if the computed values are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import numpy as np

from penstock.offline.convert.base import Exported, FrameworkModel
from penstock.offline.convert.certificate import Divergence
from penstock.offline.convert.folds import Folds
from penstock.offline.convert.parity.compare import statistics
from penstock.offline.convert.parity.nodes import Nodes
from penstock.tensor import Array

_LEAST_VALUES = 4
"""Smallest number of different equal values that cannot be equal by chance."""
_NEAR = 0.01
_LEAST_INTEGERS = 16
"""Smaller arrays of integers can be shapes, axes or pads, which exporters make."""
_WRONG_INTEGERS = 16
"""At most one integer in so many is wrong. Exporters may compute indices in which more differ."""
_ASKED = 16
"""Number of values that the source is asked for at once."""

_MOST_AXES = 5
_SAMPLE = 256
"""Number of values that show whether an order of the axes is the right one."""
_PLAUSIBLE = 0.25
"""Least part of the sample that must be equal."""
_ROUNDING = 1e-5
"""Relative rounding error of a computed value."""
_LEVEL = 0.3
"""Part of the largest value that is added to each value, because the rounding of a value near 0 depends on the others."""
_OUTLYING = 100.0
"""A difference that exceeds the upper quartile of all differences so many times is no rounding error."""

_MOST_ROUNDING = 0.1
"""Largest relative difference that can be rounding, as in the sine of a large angle."""


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
    folds = Folds(nodes.proto.graph, nodes.stored, _needed(nodes, source, exported, left))
    limit = _NEAR if exported.computed is None else np.inf
    for name, theirs, is_exact in _values(source, exported) if left else ():
        for one, ours in left.items() if (theirs.size, theirs.dtype) in kinds else ():
            if ours.size != theirs.size or ours.dtype != theirs.dtype:
                continue
            if is_exact and one == name and ours.shape == theirs.shape:
                if not folds.explain(name, ours, theirs):
                    return _divergence(nodes, one, name, ours, theirs)
            elif _may_be_near(ours, exported) and _is_near(ours, theirs, limit, is_exact=is_exact):
                return _divergence(nodes, one, name, ours, theirs)
    return None


def _needed(nodes: Nodes, source: FrameworkModel, exported: Exported, left: Mapping[str, Array]) -> dict[str, Array]:
    """The vectors of the source, and the weights of the layers that read one of ``left``, if it has the name of a weight."""
    named = left.keys() & set(exported.weights)
    layers = {name for node in nodes.proto.graph.node if named & set(node.input) for name in node.input}
    values = _values(source, exported) if named else ()
    return {name: array for name, array, is_exact in values if is_exact and (array.ndim == 1 or name in layers)}


def _may_be_near(ours: Array, exported: Exported) -> bool:
    is_integer = ours.dtype.kind in "iu" and ours.size >= _LEAST_INTEGERS and exported.computed is not None
    return ours.dtype.kind == "f" or is_integer


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


def _is_near(ours: Array, theirs: Array, limit: float, *, is_exact: bool) -> bool:
    """True if most values are equal, and the others differ by at most ``limit``, relative to the weight's."""
    flat = ours.reshape(-1)
    for laid in layouts(theirs, flat):
        differs = differences(flat, laid, is_exact=is_exact)
        count, same = np.count_nonzero(differs), flat[~differs & (flat != 0)]
        most = same.size if is_exact else flat.size // 4
        if ours.dtype.kind != "f":
            most = flat.size // _WRONG_INTEGERS
        if not 0 < count <= most or np.unique(same).size < _LEAST_VALUES:
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


def is_same(ours: Array, theirs: Array, *, is_exact: bool) -> bool:
    """True if the arrays have the same values in some order of the axes. Unless ``is_exact``, rounding may differ."""
    flat = ours.reshape(-1)
    if is_exact and _fingerprint(ours) != _fingerprint(theirs):
        return False
    return any(not differences(flat, laid, is_exact=is_exact).any() for laid in layouts(theirs, flat))


def layouts(array: Array, flat: Array) -> Iterator[Array]:
    """``array`` as a vector, in the orders of its axes in which it is similar to ``flat``."""
    if array.size != flat.size:
        return
    squeezed = array.squeeze()
    axes = range(squeezed.ndim)
    places = np.linspace(0, flat.size - 1, min(_SAMPLE, flat.size)).astype(np.int64)
    ours = flat[places]
    for order in permutations(axes) if squeezed.ndim <= _MOST_AXES else (tuple(axes),):
        turned = squeezed.transpose(order)
        theirs = turned[np.unravel_index(places, turned.shape)] if turned.ndim else turned.reshape(-1)
        if np.count_nonzero(~differences(ours, theirs, is_exact=False)) >= _PLAUSIBLE * len(places):
            yield turned.reshape(-1)


def differences(ours: Array, theirs: Array, *, is_exact: bool) -> Array:
    """Which values differ. Unless ``is_exact``, by more than rounding."""
    if is_exact or ours.dtype.kind != "f":
        found: Array = ours != theirs
        return found & ~(np.isnan(ours) & np.isnan(theirs)) if ours.dtype.kind == "f" else found
    one, other = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(other)
    scale = np.abs(other) + _LEVEL * np.abs(other[finite]).max(initial=0.0)
    with np.errstate(all="ignore"):
        error = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other) / scale)
    rounding = max(_ROUNDING, 4 * float(np.finfo(ours.dtype).eps))
    limit = max(rounding, min(_OUTLYING * float(np.quantile(error, 0.75)), _MOST_ROUNDING))
    return ~(error <= limit)


def _fingerprint(array: Array) -> tuple[int, int]:
    """Equal for two arrays of one type that have the same values in any order."""
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").astype(np.uint64)
    return int(bits.sum()), int((bits * bits).sum())
