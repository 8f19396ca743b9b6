"""Undo pruning and weight sharing: put the original weights back. The result must equal the model that the method was given."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from penstock.artifact import Artifact
from penstock.errors import WrongResult
from penstock.offline.compress.restored.unrounded import FIX
from penstock.offline.compress.sharing.layers import SharedTensor, find_layers
from penstock.offline.optimize import graph
from penstock.offline.optimize.model import load_model
from penstock.tensor import Array

_CLOSE = 1e-5
"""Relative error of centroids in their own type."""


def unpruned(made: onnx.ModelProto, source: Artifact, *, by_magnitude: bool = True) -> onnx.ModelProto:
    """``made``, a pruned version of ``source``, with the weights of ``source``. Raises WrongResult if a changed element is not zero or,
    with ``by_magnitude``, larger than one that is left.
    """
    for tensor, before, value in _changed(made, source):
        after = numpy_helper.to_array(tensor)
        old = np.asarray(graph.constant(value))
        if not ((after == old) | (after == 0)).all():
            raise WrongResult(f"pruning changed elements of weight '{tensor.name}' to values other than zero", FIX)
        magnitudes = np.abs(old.astype(np.float64))
        if by_magnitude and magnitudes[after != old].max(initial=0.0) > magnitudes[after != 0].min(initial=np.inf):
            raise WrongResult(f"pruning removed large elements of weight '{tensor.name}', and kept smaller ones", FIX)
        tensor.CopyFrom(before)
    return made


def unshared(made: onnx.ModelProto, source: Artifact) -> onnx.ModelProto:
    """``made``, a version of ``source`` with shared weights, with the weights of ``source``. Raises WrongResult if an element has not
    the nearest of its tensor's values.
    """
    changed = list(_changed(made, source))
    layers = find_layers(load_model(source), frozenset(tensor.name for tensor, *_ in changed)) if changed else {}
    for tensor, before, _ in changed:
        if not _has_nearest(layers[tensor.name], numpy_helper.to_array(tensor)):
            raise WrongResult(f"sharing gave elements of weight '{tensor.name}' other values than the nearest", FIX)
        tensor.CopyFrom(before)
    return made


def _has_nearest(layer: SharedTensor, after: Array) -> bool:
    is_zero = layer.array == layer.zero
    if not (after[is_zero] == layer.zero).all():
        return False
    old, new = (array[~is_zero].astype(np.float64) for array in (layer.array, after))
    values = np.unique(new)
    at = np.searchsorted(values, old).clip(1, max(1, len(values) - 1))
    nearest = np.minimum(*(np.abs(values[np.minimum(place, len(values) - 1)] - old) for place in (at - 1, at)))
    return bool((np.abs(new - old) <= nearest + _CLOSE * (np.abs(old) + np.abs(new))).all())


def _changed(made: onnx.ModelProto, source: Artifact) -> list[tuple[onnx.TensorProto, onnx.TensorProto, ir.Value]]:
    """The initialisers of ``made`` that differ from those of ``source`` of the same name, type and shape."""
    known = load_model(source).graph.initializers
    found = []
    for tensor in made.graph.initializer:
        value = known.get(tensor.name)
        if value is None or value.const_value is None:
            continue
        before = ir.to_proto(value.const_value)
        if (before.data_type, before.dims) == (tensor.data_type, tensor.dims) and _bytes(before) != _bytes(tensor):
            before.name = tensor.name
            found.append((tensor, before, value))
    return found


def _bytes(tensor: onnx.TensorProto) -> bytes:
    return bytes(numpy_helper.to_array(tensor).tobytes())
