"""N:M sparsity: for every output and kernel position, keep the N largest weights of each M neighbouring input channels.

Engines with sparse kernels multiply such matrices faster, for example 2:4 on NVIDIA GPUs since Ampere. ONNX Runtime has no such
kernels for CPUs.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.errors import InvalidConfig
from penstock.offline.compress.options import Options
from penstock.offline.compress.pruning.magnitude import (
    PruneOptions,
    masked,
    prunable_weights,
    sparsity_facts,
    write_weights,
)
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import form_of
from penstock.offline.optimize.model import infer_shapes, read_proto, to_artifact
from penstock.tensor import Array


class NMOptions(Options, frozen=True):
    """The pattern, and the weights to exclude from pruning."""

    n: Annotated[int, msgspec.Meta(ge=1)] = 2
    """Number of weights kept in each group."""
    m: Annotated[int, msgspec.Meta(ge=2, le=64)] = 4
    """Input channels in a group. A layer is not pruned if its number of input channels is not a multiple of ``m``."""
    skip: tuple[str, ...] = ()
    """Names of weights to exclude from pruning."""


def prune_n_m(artifact: Artifact, options: NMOptions | None = None) -> Artifact:
    """Return ``artifact`` with all but N of every M weights set to zero. On a tie, the first weight is kept.

    In the provenance step, ``pattern`` holds for each layer the fraction of the magnitude that was kept, or the reason why the layer
    was skipped. Raises InvalidConfig if N or M is out of range or N is not below M, and the errors of ``magnitude.prune``.
    """
    options = options or NMOptions()
    options.check()
    if options.n >= options.m:
        raise InvalidConfig(f"nothing to prune: n is {options.n} and m is {options.m}", "choose n below m")
    model = infer_shapes(read_proto(artifact))
    weights = prunable_weights(model, PruneOptions(skip=options.skip))
    pattern = {}
    for name, array in weights.items():
        weights[name], pattern[name] = _prune_layer(model.graph.initializers[name], array, options)
    write_weights(model, weights)
    facts = {**sparsity_facts(weights), "pattern": pattern, "faster_on_cpu": False}
    return artifact.derive(to_artifact(model), "prune_n_m", msgspec.to_builtins(options), facts)


def _prune_layer(weight: ir.Value, array: Array, options: NMOptions) -> tuple[Array, dict[str, Any]]:
    """The pruned array, and its record for the provenance step."""
    axis = _input_axis(weight)
    if axis is None:
        return array, {"left_alone": "its consumers sum over different axes"}
    if array.shape[axis] % options.m:
        return array, {"left_alone": f"{options.m} does not divide its {array.shape[axis]} input channels"}
    mask = np.moveaxis(n_m_mask(np.moveaxis(array, axis, -1), options.n, options.m), -1, axis)
    magnitudes = np.abs(array.astype(np.float64))
    total = float(magnitudes.sum())
    return masked(array, mask), {"kept": round(float(magnitudes[mask].sum()) / total, 6) if total else 1.0}


def n_m_mask(rows: Array, n: int, m: int) -> Array:
    """A mask of the ``n`` largest magnitudes of every ``m`` neighbours along the last axis. ``m`` must divide the axis length."""
    groups = np.abs(rows).reshape(*rows.shape[:-1], -1, m)
    order = np.argsort(-groups, axis=-1, kind="stable")
    mask = np.zeros(groups.shape, bool)
    np.put_along_axis(mask, order[..., :n], values=True, axis=-1)
    return mask.reshape(rows.shape)


def _input_axis(weight: ir.Value) -> int | None:
    """The axis over which a weight's products are summed, or None if its consumers sum over different axes."""
    axes = set()
    rank = graph.rank(weight) or 2
    for use in weight.uses():
        form = form_of(use.node)
        if (
            form is None or use.node.op_type == "MatMul"
        ):  # a MatMul may have the weight on either side, or as a stack of matrices
            axes.add(rank - 2 if use.idx == 1 else rank - 1)
        else:
            axes.add(form.inputs)
    return axes.pop() if len(axes) == 1 else None
