"""N:M sparsity: in each group of M input channels, the N largest weights of every output and kernel position are kept.

For engines that multiply such matrices faster (2:4 on GPUs since NVIDIA's Ampere). ONNX Runtime's CPU kernels do not: they
multiply by the zeros, at the speed of any other weights.

The channels can be regrouped if the layer before writes them in the same order: swaps of channels between groups that
keep more magnitude are searched for greedily (after Pool and Yu, "Channel Permutations for N:M Sparsity", 2021, §3) where a
pair of layers lets its channels be reordered.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.errors import InvalidConfig
from penstock.offline.compress.pruning.magnitude import (
    PruneOptions,
    masked,
    prunable_weights,
    sparsity_facts,
    write_weights,
)
from penstock.offline.compress.pruning.pairs import array_of, find_pairs
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import form_of
from penstock.offline.optimize.model import infer_shapes, read_proto, to_bytes
from penstock.tensor import Array

_ROWS = 512
"""Rows of a matrix that the search for a permutation looks at, evenly spread."""


class NMOptions(msgspec.Struct, frozen=True):
    """The pattern, and the search for a better order of channels."""

    n: Annotated[int, msgspec.Meta(ge=1)] = 2
    """Weights kept of each group."""
    m: Annotated[int, msgspec.Meta(ge=2, le=64)] = 4
    """Input channels of a group; a layer whose input channels it does not divide is left alone."""
    comparisons: Annotated[int, msgspec.Meta(ge=0)] = 4000
    """Pairs of groups that are looked at for a swap, of each layer; 0 keeps the order."""
    skip: tuple[str, ...] = ()
    """Weights to leave alone, by name."""


def prune_n_m(artifact: Artifact, options: NMOptions | None = None) -> Artifact:
    """``artifact`` with N of M weights kept, largest first; of equal ones the first. For export: no faster on a CPU.

    Where channels were reordered, the unpruned model's answers are the same, up to the order of sums. The facts say for each
    layer what share of its magnitude is kept, in the given order of channels (``kept_in_order``) and as written (``kept``), and
    why a layer was left alone. Raises InvalidConfig if N is not below M, and as ``magnitude.prune``.
    """
    options = options or NMOptions()
    if options.n >= options.m:
        raise InvalidConfig(f"{options.n} of {options.m} weights kept leaves nothing to prune", "choose n below m")
    model = infer_shapes(read_proto(artifact))
    names = prunable_weights(model, PruneOptions(skip=options.skip))
    layers = {name: _prune_layer(model, name, options) for name in names}
    facts = {**sparsity_facts({name: _array(model, name) for name in names}), "pattern": layers, "faster_on_cpu": False}
    return artifact.derive(to_bytes(model), "prune_n_m", msgspec.to_builtins(options), facts)


def _prune_layer(model: ir.Model, name: str, options: NMOptions) -> dict[str, Any]:
    """Prune one weight in place, and describe the result."""
    array, axis = _array(model, name), _input_axis(model.graph.initializers[name])
    if axis is None:
        return {"left_alone": "its readers sum over different axes"}
    if array.shape[axis] % options.m:
        return {"left_alone": f"{options.m} does not divide its {array.shape[axis]} input channels"}
    before = kept_share(_rows(array, axis), options)
    if options.comparisons:
        array = _reordered(model, name, options)
    mask = np.moveaxis(n_m_mask(np.moveaxis(array, axis, -1), options.n, options.m), -1, axis)
    write_weights(model, {name: masked(array, mask)})
    return {"kept": round(kept_share(_rows(array, axis), options), 6), "kept_in_order": round(before, 6)}


def n_m_mask(rows: Array, n: int, m: int) -> Array:
    """True for the ``n`` largest magnitudes of every ``m`` neighbours along the last axis, which ``m`` divides."""
    groups = np.abs(rows).reshape(*rows.shape[:-1], -1, m)
    order = np.argsort(-groups, axis=-1, kind="stable")
    mask = np.zeros(groups.shape, bool)
    np.put_along_axis(mask, order[..., :n], values=True, axis=-1)
    return mask.reshape(rows.shape)


def kept_share(rows: Array, options: NMOptions) -> float:
    """Share of the magnitude of [rows, columns] that the pattern keeps."""
    total = float(rows.sum())
    return float(_kept(rows.reshape(len(rows), 1, -1, options.m), options.n)[0]) / total if total else 1.0


def find_order(rows: Array, options: NMOptions) -> Array:
    """An order of the columns of magnitudes [rows, columns] that keeps more, by greedy swaps; the given one if none does.

    Two groups are compared at a time and the best of their M² swaps is made, if it gains; rounds over all pairs of groups go
    on until one brings nothing, or the comparisons are used up.
    """
    groups = np.arange(rows.shape[1]).reshape(-1, options.m)
    step = max(1, len(rows) // _ROWS)
    sample = np.ascontiguousarray(rows[::step], np.float64)
    left, swapped = options.comparisons, True
    while swapped:
        swapped = False
        for first, second in itertools.combinations(range(len(groups)), 2):
            if left == 0:
                return groups.reshape(-1)
            left -= 1
            swap = _best_swap(sample, groups[first], groups[second], options.n)
            if swap is not None:
                i, j = swap
                groups[first, i], groups[second, j] = groups[second, j], groups[first, i]
                swapped = True
    return groups.reshape(-1)


def _best_swap(rows: Array, first: Array, second: Array, n: int) -> tuple[int, int] | None:
    """Positions in two groups of columns whose swap keeps most, if more than now by more than rounding."""
    m = len(first)
    pairs = np.tile(np.stack([first, second]), (m * m + 1, 1, 1))
    swaps = [(i, j) for i in range(m) for j in range(m)]
    for number, (i, j) in enumerate(swaps, 1):
        pairs[number, 0, i], pairs[number, 1, j] = second[j], first[i]
    kept = _kept(rows[:, pairs], n)
    best = int(kept.argmax())
    return swaps[best - 1] if kept[best] > kept[0] * (1 + 1e-9) else None


def _kept(groups: Array, n: int) -> Array:
    """The magnitude that each choice of [rows, choices, groups, m] keeps."""
    m = groups.shape[-1]
    return np.asarray(np.partition(groups, m - n, axis=-1)[..., m - n :].sum(axis=(0, 2, 3)))


def _reordered(model: ir.Model, name: str, options: NMOptions) -> Array:
    """The weight with its input channels reordered to keep more, where the layer before can be reordered too."""
    pair = next((pair for pair in find_pairs(model) if pair.second.weight.name == name), None)
    if pair is not None and pair.repeat == 1:
        rows = np.abs(pair.second.weights().astype(np.float64)).swapaxes(1, 2)
        pair.select(model, find_order(rows.reshape(-1, rows.shape[-1]), options))
    return _array(model, name)


def _array(model: ir.Model, name: str) -> Array:
    return array_of(model.graph.initializers[name])


def _input_axis(weight: ir.Value) -> int | None:
    """The axis over which a weight's products are summed; None if its readers do not agree on it."""
    axes = set()
    rank = graph.rank(weight) or 2
    for use in weight.uses():
        form = form_of(use.node)
        if form is None or use.node.op_type == "MatMul":  # whose weight may be on either side, and a stack of matrices
            axes.add(rank - 2 if use.idx == 1 else rank - 1)
        else:
            axes.add(form.inputs)
    return axes.pop() if len(axes) == 1 else None


def _rows(array: Array, axis: int) -> Array:
    magnitudes = np.moveaxis(np.abs(array.astype(np.float64)), axis, -1)
    return magnitudes.reshape(-1, magnitudes.shape[-1])
