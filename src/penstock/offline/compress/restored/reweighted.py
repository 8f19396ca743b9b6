"""Undo pruning and weight sharing: put the original weights back. The result must equal the method's input model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.errors import WrongResult
from penstock.offline.compress.restored.unrounded import FIX
from penstock.offline.compress.sharing.layers import SharedTensor, find_layers
from penstock.offline.optimize.mapped import array_of
from penstock.offline.optimize.model import load_model, read_proto
from penstock.tensor import Array

_CLOSE = 1e-5
"""Maximum relative error from rounding to the type of the values."""
_MEASURED = 1e-2
"""Maximum relative error of a recorded error, which was measured before the values were rounded to their type."""

Facts = Mapping[str, Mapping[str, Any]]
"""The facts of the provenance step, by weight."""


def unpruned(made: onnx.ModelProto, source: Artifact, pruned: Facts, *, by_magnitude: bool = True) -> onnx.ModelProto:
    """Put the weights of ``source`` into its pruned version ``made``. ``pruned`` has facts by weight.

    Raises WrongResult if the number of nonzero elements differs from the facts, if a changed element is not zero or, with
    ``by_magnitude``, if a kept element is smaller than a removed element.
    """
    for tensor, before in _changed(made, source, pruned):
        after, old = array_of(tensor), array_of(before)
        is_counted = np.count_nonzero(after) == pruned[tensor.name]["nonzero"]
        if not is_counted or not ((after == old) | (after == 0)).all():
            raise WrongResult(f"weight '{tensor.name}' is not the original's with some elements set to zero", FIX)
        magnitudes = np.abs(old.astype(np.float64))
        if by_magnitude and magnitudes[after != old].max(initial=0.0) > magnitudes[after != 0].min(initial=np.inf):
            raise WrongResult(f"pruning removed large elements of weight '{tensor.name}', and kept smaller ones", FIX)
        tensor.CopyFrom(before)
    return made


def unshared(made: onnx.ModelProto, source: Artifact, shared: Facts) -> onnx.ModelProto:
    """Put the weights of ``source`` into ``made``, its version with shared weights. ``shared`` has facts by weight.

    Raises WrongResult if an element did not get the nearest of its tensor's shared values, or if the error is larger than recorded.
    """
    layers = find_layers(load_model(source), frozenset(shared))
    for tensor, before in _changed(made, source, shared):
        layer, after = layers[tensor.name], array_of(tensor)
        off = np.linalg.norm(after.astype(np.float64) - layer.array)
        size = np.linalg.norm(layer.array.astype(np.float64) - layer.zero)
        is_close = off <= (shared[tensor.name]["relative_error"] * (1 + _MEASURED) + _CLOSE) * size
        if not is_close or not _has_nearest(layer, after):
            raise WrongResult(f"elements of weight '{tensor.name}' do not have the nearest shared value", FIX)
        tensor.CopyFrom(before)
    return made


def _has_nearest(layer: SharedTensor, after: Array) -> bool:
    is_zero = layer.array == layer.zero
    if not (after[is_zero] == layer.zero).all():
        return False
    old, new = (array[~is_zero].astype(np.float64) for array in (layer.array, after))
    values = np.unique(new)
    at = np.searchsorted(values, old)
    nearest = np.minimum(*(np.abs(values[np.clip(place, 0, len(values) - 1)] - old) for place in (at - 1, at)))
    return bool((np.abs(new - old) <= nearest + _CLOSE * (np.abs(old) + np.abs(new))).all())


def _changed(
    made: onnx.ModelProto, source: Artifact, names: Collection[str]
) -> Iterator[tuple[onnx.TensorProto, onnx.TensorProto]]:
    """The initialisers of ``made`` among ``names`` that differ from those of ``source``, in values only, with those of ``source``."""
    known = {tensor.name: tensor for tensor in read_proto(source).graph.initializer}
    for tensor in made.graph.initializer:
        before = known.get(tensor.name) if tensor.name in names else None
        if before is not None and (before.data_type, before.dims) == (tensor.data_type, tensor.dims):
            yield tensor, before
