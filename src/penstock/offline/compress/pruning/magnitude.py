"""Magnitude pruning: set the smallest weights to zero.

A rule selects the weights: the smallest weights of the whole model, the smallest fraction of each layer, or all weights below a
multiple of the layer's standard deviation (Han et al., "Learning both Weights and Connections for Efficient Neural Networks", 2015,
§3.2). On a tie, the weight that comes first in the file is pruned, so the result is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.errors import InvalidConfig, InvalidModel, Unsupported
from penstock.offline.compress.options import Part
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import reads_weight
from penstock.offline.optimize.model import load_model, to_artifact
from penstock.tensor import Array

Masks = dict[str, Array]
"""For each weight, by name, a boolean array of the weight's shape. True marks the elements that are kept."""

LAYER_CAP = 0.99
"""Maximum sparsity of one layer. A layer in which all weights are zero would block the signal."""


class GlobalRule(msgspec.Struct, frozen=True, tag="global"):
    """Prune the smallest magnitudes of the whole model, over all prunable weights."""

    sparsity: Part = 0.9
    """Fraction of all prunable weights that become zero."""
    layer_cap: Part = LAYER_CAP
    """Maximum sparsity of one layer."""

    def scaled(self, factor: float) -> GlobalRule:
        """A copy of this rule whose sparsity is multiplied by ``factor`` (0 to 1)."""
        return msgspec.structs.replace(self, sparsity=self.sparsity * factor)

    def masks(self, weights: Mapping[str, Array]) -> Masks:
        """Raises InvalidConfig if ``layer_cap`` makes the sparsity unreachable."""
        scores = [magnitude(array) for array in weights.values()]
        capped = [np.where(smallest(score, int(self.layer_cap * score.size)), score, np.inf) for score in scores]
        together = np.concatenate(capped)
        count, most = int(self.sparsity * together.size), int(np.isfinite(together).sum())
        if count > most and self.sparsity > self.layer_cap:  # otherwise, only whole numbers of weights are missing
            raise InvalidConfig(
                f"a sparsity of {self.sparsity:g} cannot be reached with a maximum of {self.layer_cap:g} for each layer",
                f"ask for at most {math.floor(1e4 * most / together.size) / 1e4:.2%}, or, in Python, raise layer_cap",
            )
        parts = np.split(~smallest(together, min(count, most)), np.cumsum([score.size for score in scores])[:-1])
        return {name: part.reshape(weights[name].shape) for name, part in zip(weights, parts, strict=True)}


class LayerRule(msgspec.Struct, frozen=True, tag="layers"):
    """Prune the smallest magnitudes of each layer, with a separate sparsity for each layer."""

    sparsities: dict[str, Part]
    """Sparsity by weight name. Other weights stay dense."""

    def scaled(self, factor: float) -> LayerRule:
        return LayerRule({name: share * factor for name, share in self.sparsities.items()})

    def masks(self, weights: Mapping[str, Array]) -> Masks:
        """Raises InvalidConfig if a name is not a prunable weight."""
        _check_names(self.sparsities, weights)
        counts = {name: int(self.sparsities.get(name, 0.0) * array.size) for name, array in weights.items()}
        return {name: ~smallest(magnitude(w), counts[name]).reshape(w.shape) for name, w in weights.items()}


class DeviationRule(msgspec.Struct, frozen=True, tag="deviations"):
    """Prune weights below ``quality`` times the standard deviation of their layer, as in Han et al., 2015."""

    quality: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """The threshold is this multiple of the layer's standard deviation. The largest weight of a layer is never pruned."""

    def scaled(self, factor: float) -> DeviationRule:
        return DeviationRule(self.quality * factor)

    def masks(self, weights: Mapping[str, Array]) -> Masks:
        found = {}
        for name, array in weights.items():
            score = magnitude(array)
            bound = min(self.quality * float(array.astype(np.float64).std()), float(score.max(initial=0.0)))
            found[name] = (score >= bound).reshape(array.shape)
        return found


Rule = GlobalRule | LayerRule | DeviationRule


class PruneOptions(msgspec.Struct, frozen=True):
    """The pruning rule, and the weights to exclude from pruning."""

    rule: Rule = GlobalRule()
    embeddings: bool = False
    """Also prune embedding tables (weights of Gather)."""
    skip: tuple[str, ...] = ()
    """Names of weights to exclude from pruning."""


def prune(artifact: Artifact, options: PruneOptions | None = None) -> Artifact:
    """Return ``artifact`` with its smallest weights set to zero, without retraining. The graph and the file size stay the same.

    Raises InvalidModel if the model cannot be read or a weight is NaN or infinite, Unsupported if it has no prunable
    weight, InvalidConfig if the rule does not fit the model.
    """
    options = options or PruneOptions()
    model = load_model(artifact)
    weights = prunable_weights(model, options)
    pruned = {name: masked(weights[name], mask) for name, mask in options.rule.masks(weights).items()}
    write_weights(model, pruned)
    return artifact.derive(to_artifact(model), "prune", msgspec.to_builtins(options), sparsity_facts(pruned))


def prunable_weights(model: ir.Model, options: PruneOptions | None = None) -> dict[str, Array]:
    """The constant float weights of Conv, ConvTranspose, Gemm and MatMul, in file order. The arrays are read-only.

    A weight that several nodes share appears once. A weight is excluded if any node uses it in another role, as when an embedding is
    also the output layer. Raises the errors of ``prune``.
    """
    options = options or PruneOptions()
    found = {
        name: array
        for name, value in model.graph.initializers.items()
        if value.dtype in graph.FLOATS and _is_weight(value, options.embeddings)
        if (array := graph.constant(value)) is not None and array.ndim >= 2 and array.size
    }
    _check_names(options.skip, found)
    found = {name: array for name, array in found.items() if name not in options.skip}
    if not found:
        raise Unsupported(
            "the model has no weight that can be pruned",
            "pruning needs Conv, ConvTranspose, Gemm or MatMul with constant float weights; prune before quantisation",
        )
    for name, array in found.items():
        if not np.isfinite(array.astype(np.float32) if array.dtype.itemsize < 4 else array).all():
            raise InvalidModel(f"weight '{name}' contains NaN or infinity", "train or export the model again")
    return found


def masked(array: Array, mask: Array) -> Array:
    """A copy of ``array`` with +0 where ``mask`` is False."""
    return np.asarray(np.where(mask, array, np.zeros((), array.dtype)))


def write_weights(model: ir.Model, arrays: Mapping[str, Array]) -> None:
    """Replace initialisers of ``model`` by the ``arrays`` of the same name."""
    for name, array in arrays.items():
        value = model.graph.initializers[name]
        value.const_value = ir.Tensor(np.ascontiguousarray(array), name=name, dtype=value.dtype)
        value.shape = ir.Shape(array.shape)


def sparsity_facts(weights: Mapping[str, Array]) -> dict[str, Any]:
    """Numbers of weights and of nonzero weights, by layer and in total. ``fewer`` is the total divided by the nonzero total."""

    def counts(weights: int, nonzero: int) -> dict[str, Any]:
        return {"weights": weights, "nonzero": nonzero, "sparsity": round(1 - nonzero / max(1, weights), 6)}

    layers = {name: counts(array.size, int(np.count_nonzero(array))) for name, array in weights.items()}
    total, nonzero = (sum(layer[key] for layer in layers.values()) for key in ("weights", "nonzero"))
    return {**counts(total, nonzero), "fewer": round(total / max(1, nonzero), 3), "layers": layers}


def sparsity(artifact: Artifact, options: PruneOptions | None = None) -> dict[str, Any]:
    """The ``sparsity_facts`` of an artifact. Raises the errors of ``prune``."""
    return sparsity_facts(prunable_weights(load_model(artifact), options))


def magnitude(array: Array) -> Array:
    """``|w|`` as a flat FP32 array, or FP64 for FP64 weights."""
    return np.asarray(np.abs(array.reshape(-1).astype(np.float64 if array.dtype == np.float64 else np.float32)))


def smallest(scores: Array, count: int) -> Array:
    """A mask of exactly the ``count`` smallest elements of a flat array. On a tie, the earlier elements are selected."""
    chosen = np.zeros(scores.size, bool)
    if count > 0:
        bound = np.partition(scores, count - 1)[count - 1]
        chosen = scores < bound
        chosen[np.flatnonzero(scores == bound)[: count - int(chosen.sum())]] = True
    return chosen


def _is_weight(value: ir.Value, embeddings: bool) -> bool:
    uses = value.uses()
    return bool(uses) and all(
        reads_weight(use.node, use.idx)
        or (embeddings and (use.node.domain, use.node.op_type, use.idx) == ("", "Gather", 0))
        for use in uses
    )


def _check_names(names: Collection[str], weights: Mapping[str, Array]) -> None:
    if unknown := sorted(set(names) - set(weights)):
        raise InvalidConfig(f"the model has no prunable weight(s) {unknown}", f"choose from {sorted(weights)[:20]}")
