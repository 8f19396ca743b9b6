"""Weight sharing: every nonzero weight of a layer becomes one of a few values, its centroid.

Each layer has its own clusters. Zeros stay zero, so a pruned model stays pruned (Han et al. 2016, §3). The graph and the file size
stay the same; only the coded model is smaller.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.offline.compress.options import Options
from penstock.offline.compress.sharing.kmeans import kmeans, nearest
from penstock.offline.compress.sharing.layers import SharedTensor, find_layers
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.optimize.model import load_model, to_artifact
from penstock.tensor import Array

MAX_BITS = 12
_HALF_ERROR = 2.0**-10


_Bits = Annotated[int, msgspec.Meta(ge=0, le=MAX_BITS)]


class ShareOptions(Options, frozen=True):
    """Number of bits per weight, by kind of layer: a layer has 2 ** bits values in addition to zero. 0 bits leave it unchanged."""

    conv_bits: _Bits = 8
    fc_bits: _Bits = 5
    bias_bits: _Bits = 6
    """Bits for float biases that have at least 16 elements."""
    bits: dict[str, _Bits] = {}
    """Bits of individual tensors, by name, which override the bits of the kind of layer. Any float or 8-bit tensor may be named, e.g.
    a table of Gather."""
    half_codebooks: bool = True
    """Round centroids to FP16 if no centroid changes by more than 2^-10 of its value. This halves the size of codebooks."""

    def bits_of(self, name: str, layer: SharedTensor) -> int:
        """Bits of the tensor ``name``; 0 leaves it unchanged."""
        by_kind = {"conv": self.conv_bits, "fc": self.fc_bits, "bias": self.bias_bits}
        return self.bits.get(name, by_kind.get(layer.kind, 0))


def share(
    artifact: Artifact,
    options: ShareOptions | None = None,
    on_progress: Progress = no_progress,
) -> Artifact:
    """Return ``artifact`` with at most 2 ** bits values in addition to zero in each layer, chosen for the least squared error.

    Integers that DequantizeLinear reads stay integers, with the same zero point. Raises InvalidModel if the model cannot be read or a
    weight is not finite, Unsupported if it has no weights, InvalidConfig for an unknown name or bits out of range.
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
    return artifact.derive(to_artifact(model), "share", msgspec.to_builtins(options), {"layers": facts})


def share_layer(layer: SharedTensor, bits: int, half: bool) -> tuple[Array, dict[str, Any]]:
    """The layer's tensor, in its own type, with at most 2 ** ``bits`` values in addition to zero, and the facts for the provenance."""
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
    """The centroids rounded to FP16 if all of them stay close enough, else to FP32; returned as FP64."""
    with np.errstate(over="ignore"):
        halves = centroids.astype(np.float16).astype(np.float64)
    close = half and bool((np.abs(halves - centroids) <= _HALF_ERROR * np.abs(centroids)).all())
    return np.unique(halves if close else centroids.astype(np.float32).astype(np.float64))
