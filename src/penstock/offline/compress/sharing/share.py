"""Weight sharing: every weight of a layer becomes one of a few values, its centroid; zeros stay zero.

Clusters are per layer, never across layers, and zeros keep their own place, so that a pruned model stays pruned (Han et al.
2016, §3). The model has the same graph and the same size until it is coded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.errors import InvalidConfig
from penstock.offline.compress.sharing.kmeans import kmeans, nearest
from penstock.offline.compress.sharing.layers import SharedTensor, find_layers
from penstock.offline.optimize.model import load_model, to_bytes
from penstock.tensor import Array

MAX_BITS = 12
_HALF_ERROR = 2.0**-10


class ShareOptions(msgspec.Struct, frozen=True):
    """How many values the layers may have: 2 ** bits each (bits from 1 to 12), beside zero. 0 leaves a kind of layer as it is."""

    conv_bits: int = 8
    fc_bits: int = 5
    bias_bits: int = 6
    """Of float biases of at least 16 elements."""
    bits: dict[str, int] = {}
    """By tensor, before the three above; may name any float or 8-bit tensor, tables that Gather reads too."""
    half_codebooks: bool = True
    """Round centroids to FP16 where that moves none by more than 2^-10 of itself: codebooks of half the size."""

    def check(self) -> None:
        """Raises InvalidConfig for bits out of range."""
        kinds = (self.conv_bits, self.fc_bits, self.bias_bits)
        for bits in (*kinds, *self.bits.values()):
            if not 0 <= bits <= MAX_BITS:
                raise InvalidConfig(f"weights cannot share 2 ** {bits} values", f"give 0 to {MAX_BITS} bits")

    def bits_of(self, name: str, layer: SharedTensor) -> int:
        """Bits of the tensor ``name``; 0 if it stays as it is."""
        by_kind = {"conv": self.conv_bits, "fc": self.fc_bits, "bias": self.bias_bits}
        return self.bits.get(name, by_kind.get(layer.kind, 0))


def share(
    artifact: Artifact,
    options: ShareOptions | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Artifact:
    """``artifact`` with at most 2 ** bits values besides zero in each layer, the ones of least squared error.

    Integers behind DequantizeLinear stay integers, and their zero point stays where it is. Raises InvalidModel if the model
    cannot be read or a weight is not finite, Unsupported if it has no weights, InvalidConfig if a name or bits fit nothing.
    """
    options = options or ShareOptions()
    options.check()
    model = load_model(artifact)
    layers = find_layers(model, frozenset(options.bits))
    facts: dict[str, Any] = {}
    for done, (name, layer) in enumerate(layers.items()):
        if bits := options.bits_of(name, layer):
            shared, facts[name] = share_layer(layer, bits, options.half_codebooks)
            model.graph.initializers[name].const_value = ir.Tensor(shared, name=name)
        on_progress(done + 1, len(layers))
    return artifact.derive(to_bytes(model), "share", msgspec.to_builtins(options), {"layers": facts})


def share_only(artifact: Artifact, name: str, bits: int) -> Artifact:
    """``artifact`` with one tensor shared, all others as they are. Raises as ``share``."""
    model = load_model(artifact)
    shared, facts = share_layer(find_layers(model, frozenset([name]))[name], bits)
    model.graph.initializers[name].const_value = ir.Tensor(shared, name=name)
    return artifact.derive(to_bytes(model), "share", {"bits": {name: bits}}, {"layers": {name: facts}})


def share_layer(layer: SharedTensor, bits: int, half: bool = True) -> tuple[Array, dict[str, Any]]:
    """The layer's tensor with at most 2 ** ``bits`` values besides zero, of the same type, and facts about it."""
    array = layer.array
    is_integer = array.dtype.kind in "iu"
    kept = array != layer.zero
    values, counts = np.unique(array[kept], return_counts=True)
    facts: dict[str, Any] = {"kind": layer.kind, "bits": bits, "values": int(kept.sum()), "distinct": len(values)}
    if len(values) <= 1 << bits:
        return array, {**facts, "centroids": len(values), "exact": True, "relative_error": 0.0}
    points = values.astype(np.float64)
    found = kmeans(points, counts.astype(np.float64), 1 << bits, grid=is_integer)
    centroids = found.centroids if is_integer else _rounded(found.centroids, half)
    members = centroids[nearest(points, centroids)].astype(array.dtype)
    shared = np.full_like(array, layer.zero)
    shared[kept] = members[np.searchsorted(values, array[kept])]
    wrong = counts @ (members - points) ** 2
    error = float(np.sqrt(wrong / (counts @ (points - layer.zero) ** 2)))
    return shared, {**facts, "centroids": len(centroids), "exact": found.exact, "relative_error": error}


def _rounded(centroids: Array, half: bool) -> Array:
    """FP16 numbers, as FP64, if they are close to all ``centroids``; else FP32 numbers."""
    with np.errstate(over="ignore"):
        halves = centroids.astype(np.float16).astype(np.float64)
    close = half and bool((np.abs(halves - centroids) <= _HALF_ERROR * np.abs(centroids)).all())
    return np.unique(halves if close else centroids.astype(np.float32).astype(np.float64))
