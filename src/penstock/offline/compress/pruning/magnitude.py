"""Magnitude pruning: the smallest weights become zero.

Which ones follows from a rule: the smallest of the whole model, the smallest of each layer to a share of its own, or those
below a multiple of the layer's standard deviation (Han et al., "Learning both Weights and Connections for Efficient Neural
Networks", 2015, §3.2). Ties fall to the weight that comes first in the file, so that a rule and a model give one answer.
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
from penstock.offline.optimize import graph
from penstock.offline.optimize.model import load_model, to_bytes
from penstock.tensor import Array

Masks = dict[str, Array]
"""Booleans of the shape of each weight; true for the elements that are kept."""

LAYER_CAP = 0.99
"""The most that one layer may lose: a layer without weights lets nothing through."""

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

_WEIGHT_INPUTS = {"Conv": (1,), "ConvTranspose": (1,), "Gemm": (1,), "MatMul": (0, 1)}


class GlobalRule(msgspec.Struct, frozen=True, tag="global"):
    """The smallest magnitudes of all prunable weights together, however the layers share them."""

    sparsity: Share = 0.9
    """Share of all prunable weights that become zero."""
    layer_cap: Share = LAYER_CAP
    """The most that one layer may lose: a layer without weights lets nothing through."""

    def scaled(self, factor: float) -> GlobalRule:
        """The same rule on the way to its goal, at ``factor`` (0 to 1) of it."""
        return msgspec.structs.replace(self, sparsity=self.sparsity * factor)

    def masks(self, weights: Mapping[str, Array]) -> Masks:
        """Raises InvalidConfig if the cap keeps the sparsity from being reached."""
        scores = {name: magnitude(array) for name, array in weights.items()}
        count = int(self.sparsity * sum(score.size for score in scores.values()))
        candidates = []
        for score in scores.values():
            allowed = smallest(score, int(self.layer_cap * score.size))
            candidates.append(np.where(allowed, score, np.inf))
        together = np.concatenate(candidates)
        if count > (most := int(np.isfinite(together).sum())):
            raise InvalidConfig(
                f"a sparsity of {self.sparsity:g} cannot be reached while no layer may lose more than {self.layer_cap:g}",
                f"ask for at most {math.floor(1e4 * most / together.size) / 1e4:.2%}, or, in Python, raise layer_cap",
            )
        parts = np.split(~smallest(together, count), np.cumsum([score.size for score in scores.values()])[:-1])
        return {name: part.reshape(weights[name].shape) for name, part in zip(weights, parts, strict=True)}


class LayerRule(msgspec.Struct, frozen=True, tag="layers"):
    """Each layer's smallest magnitudes, to a share of its own; layers that are not named keep all."""

    sparsities: dict[str, Share]
    """By weight."""

    def scaled(self, factor: float) -> LayerRule:
        return LayerRule({name: share * factor for name, share in self.sparsities.items()})

    def masks(self, weights: Mapping[str, Array]) -> Masks:
        """Raises InvalidConfig for a name that is no prunable weight."""
        _check_names(self.sparsities, weights)
        removed = {
            name: smallest(magnitude(array), int(self.sparsities.get(name, 0.0) * array.size))
            for name, array in weights.items()
        }
        return {name: ~mask.reshape(weights[name].shape) for name, mask in removed.items()}


class DeviationRule(msgspec.Struct, frozen=True, tag="deviations"):
    """Weights below ``quality`` times the standard deviation of their layer: the rule of the paper."""

    quality: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """If the rule removes every weight of a layer, the largest one stays."""

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
    """How much to prune, and the weights to leave alone."""

    rule: Rule = GlobalRule()
    embeddings: bool = False
    """Whether tables that Gather reads are pruned too."""
    skip: tuple[str, ...] = ()
    """Weights to leave alone, by name."""


def prune(artifact: Artifact, options: PruneOptions | None = None) -> Artifact:
    """``artifact`` with its smallest weights zero, without retraining: the same graph, the same file size until it is coded.

    Raises InvalidModel if the model cannot be read or a weight is NaN or infinite, Unsupported if it has no prunable
    weight, InvalidConfig if the rule and the model do not fit.
    """
    options = options or PruneOptions()
    model = load_model(artifact)
    weights = prunable_weights(model, options)
    masks = options.rule.masks(weights)
    pruned = {name: masked(array, masks[name]) for name, array in weights.items()}
    write_weights(model, pruned)
    return artifact.derive(to_bytes(model), "prune", msgspec.to_builtins(options), sparsity_facts(pruned))


def prunable_weights(model: ir.Model, options: PruneOptions | None = None) -> dict[str, Array]:
    """The constant float weights of Conv, ConvTranspose, Gemm and MatMul, in the order of the file; arrays not to be written to.

    A weight that several nodes read is there once; it is left out if any of them reads it as something else, such as an
    embedding that is also the output layer. Biases, scales and tables are no weights. Raises as ``prune``.
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
            raise InvalidModel(f"weight '{name}' holds NaN or infinity", "train or export the model again")
    return found


def masked(array: Array, mask: Array) -> Array:
    """``array`` with +0 where ``mask`` is false."""
    return np.asarray(np.where(mask, array, np.zeros((), array.dtype)))


def write_weights(model: ir.Model, arrays: Mapping[str, Array]) -> None:
    """Replace the initialisers of ``model`` that ``arrays`` names."""
    for name, array in arrays.items():
        value = model.graph.initializers[name]
        value.const_value = ir.Tensor(np.ascontiguousarray(array), name=name, dtype=value.dtype)
        value.shape = ir.Shape(array.shape)


def sparsity_facts(weights: Mapping[str, Array]) -> dict[str, Any]:
    """The zeros of each layer and in total; ``fewer`` is the factor by which the number of weights shrank."""
    layers = {name: _counts(array.size, int(np.count_nonzero(array))) for name, array in weights.items()}
    total = _counts(
        sum(layer["weights"] for layer in layers.values()), sum(layer["nonzero"] for layer in layers.values())
    )
    return {**total, "fewer": round(total["weights"] / max(1, total["nonzero"]), 3), "layers": layers}


def sparsity(artifact: Artifact, options: PruneOptions | None = None) -> dict[str, Any]:
    """``sparsity_facts`` of a model as it is. Raises as ``prune``."""
    return sparsity_facts(prunable_weights(load_model(artifact), options))


def magnitude(array: Array) -> Array:
    """``|w|``, flat, in FP32, or FP64 for FP64."""
    return np.asarray(np.abs(array.reshape(-1).astype(np.float64 if array.dtype == np.float64 else np.float32)))


def smallest(scores: Array, count: int) -> Array:
    """True for exactly the ``count`` smallest of a flat array; of equal ones the first."""
    chosen = np.zeros(scores.size, bool)
    if count > 0:
        bound = np.partition(scores, count - 1)[count - 1]
        chosen = scores < bound
        chosen[np.flatnonzero(scores == bound)[: count - int(chosen.sum())]] = True
    return chosen


def _is_weight(value: ir.Value, embeddings: bool) -> bool:
    inputs = {**_WEIGHT_INPUTS, "Gather": (0,)} if embeddings else _WEIGHT_INPUTS
    uses = value.uses()
    return bool(uses) and all(use.node.domain == "" and use.idx in inputs.get(use.node.op_type, ()) for use in uses)


def _check_names(names: Collection[str], weights: Mapping[str, Array]) -> None:
    if unknown := sorted(set(names) - set(weights)):
        raise InvalidConfig(f"no prunable weight(s) {unknown}", f"there are {sorted(weights)[:20]}")


def _counts(weights: int, nonzero: int) -> dict[str, Any]:
    return {"weights": weights, "nonzero": nonzero, "sparsity": round(1 - nonzero / max(1, weights), 6)}
