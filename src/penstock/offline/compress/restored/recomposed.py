"""Undo a low-rank split: multiply the factors of each layer, and put the product into the method's input model.

The result has the original layers, with other weights, so it must equal the split model. For a split into two factors, the product is
the projection of the original weight on the span of the last factor (``low_rank/matrix.py``). The change of a bias is perpendicular to
that span, because it is the part of the mean that the projection removes.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.errors import WrongResult
from penstock.offline.compress.low_rank.convolution import SplitForm
from penstock.offline.compress.low_rank.layers import SplittableLayer, layers, replace
from penstock.offline.compress.low_rank.matrix import Split
from penstock.offline.compress.restored.unrounded import FIX
from penstock.offline.optimize.mapped import array_of
from penstock.offline.optimize.model import load_model, to_proto
from penstock.tensor import Array

_CLOSE = 1e-3
"""Largest relative error of a projection, which is computed in FP64 and stored in FP32."""
_NEGLIGIBLE = 1e-7
"""Singular values below this fraction of the largest count as zero."""
_OBLIQUE = 1e-2
"""As ``_CLOSE``, for a split into three factors. The weighting of the inputs may be badly conditioned."""


def recomposed(made: onnx.ModelProto, source: Artifact, split: dict[str, dict[str, Any]]) -> onnx.ModelProto:
    """Put the products of the factors in ``made`` into ``source``. ``split`` describes each split layer (``Splitter.describe``).

    Raises WrongResult if the factors of a layer do not approximate its weight.
    """
    model = load_model(source)
    known = {layer.name: layer for layer in layers(model)}
    tensors = {tensor.name: array_of(tensor) for tensor in made.graph.initializer}
    nodes = {node.name: node for node in made.graph.node}
    for name, way in split.items():
        layer = known[name]
        names = [f"{name}_factor{number}" for number in range(2 + (way["form"] == SplitForm.TUCKER.value))]
        chain = [nodes[one] for one in names if one in nodes and nodes[one].input[1] in tensors]
        if len(chain) < len(names):
            raise WrongResult(f"the split model lacks a factor of layer '{name}'", FIX)
        arrays = [tensors[node.input[1]] for node in chain]
        factors = [array if layer.kernel else array.T for array in arrays]
        weight, last = _product(factors), chain[-1]
        given = tensors.get(last.input[2]) if len(last.input) > 2 else None
        bias = np.zeros(len(layer.weight)) if given is None else given.astype(np.float64)
        if not _approximates(layer, SplitForm(way["form"]), factors, weight, bias):
            raise WrongResult(f"the factors of layer '{name}' do not approximate its weight and bias", FIX)
        replace(layer, None, Split((weight,), bias if layer.bias is None else bias - layer.bias))
    return to_proto(model)


def _product(factors: list[Array]) -> Array:
    """The weight of the layer that applies ``factors`` in turn. Each axis of the kernel is longer than 1 in one factor only."""
    first = (np.moveaxis(factor.astype(np.float64), (0, 1), (-2, -1)) for factor in factors)
    return np.moveaxis(reduce(lambda before, after: after @ before, first), (-2, -1), (0, 1))


def _approximates(layer: SplittableLayer, form: SplitForm, factors: list[Array], weight: Array, bias: Array) -> bool:
    old, new, last = layer.weight.astype(np.float64), weight, factors[-1].astype(np.float64)
    if old.shape != new.shape:
        return False
    if form is SplitForm.SPATIAL:  # the rows of the matrix are pairs of an output and a column of the kernel
        old, new = (np.moveaxis(one, 3, 1) for one in (old, new))
        old, new = (one.reshape(one.shape[0] * one.shape[1], -1) for one in (old, new))
        last = np.moveaxis(last, 3, 1)
    left, sizes, _ = np.linalg.svd(last.reshape(len(old), -1), full_matrices=False)
    span = left[:, sizes > _NEGLIGIBLE * sizes.max()]
    shift = bias - (0.0 if layer.bias is None else layer.bias)
    wrong = span @ (span.T @ shift) if form is SplitForm.CHANNEL else shift
    if np.linalg.norm(wrong) > _CLOSE * (np.linalg.norm(shift) + _CLOSE * np.linalg.norm(bias)):
        return False
    projected = (span @ (span.T @ _matrix(old))).reshape(old.shape)
    if span.shape[1] < left.shape[1] and np.linalg.norm(projected - old) > _CLOSE * np.linalg.norm(old):
        return False  # a factor of lower rank is right only if the weight has that rank
    if form is not SplitForm.TUCKER:
        return bool(np.linalg.norm(projected - new) <= _CLOSE * np.linalg.norm(old))
    return _is_oblique(projected, [one.astype(np.float64) for one in factors], float(np.linalg.norm(old)))


def _is_oblique(projected: Array, factors: list[Array], norm: float) -> bool:
    """True if the product of ``factors`` is ``projected`` · X · first for some X with first · X = 1."""
    first = _matrix(factors[0])
    inner = np.moveaxis(_product(factors[1:]), 1, -1).reshape(-1, len(first))
    outer = np.moveaxis(projected, 1, -1).reshape(len(inner), -1)
    weight = norm / (np.linalg.norm(first) or 1.0)  # makes both parts of the system count
    one = np.eye(len(first))
    system, wanted = np.concatenate([outer, weight * first]), np.concatenate([inner, weight * one])
    found = np.linalg.lstsq(system, wanted)[0]
    is_inverse = np.abs(first @ found - one).max() <= _OBLIQUE
    return bool(is_inverse and np.linalg.norm((outer @ found - inner) @ first) <= _OBLIQUE * norm)


def _matrix(array: Array) -> Array:
    return array.reshape(len(array), -1)
