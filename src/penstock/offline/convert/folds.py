"""Explains weights that an exporter changed because it folded a batch normalisation into the layer before.

The weight is multiplied by γ / √(variance + ε), one factor for each channel, and the bias b becomes β + (b - mean) · factor. γ, β,
mean and variance are vectors of the source. ε is unknown, but it is the same for all channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
import onnx

from penstock.offline.optimize.names import reads
from penstock.tensor import Array

_MOST_CHANNELS = 1 << 16
_EPSILONS = (1e-5, 1e-3)
"""The usual values. Others follow from the factors."""
_SAMPLE = 8
"""Number of channels that are compared first."""
_ROUNDING = 1e-5


class Folds:
    """The batch normalisations that ``graph`` with the constants ``stored`` may contain as parts of other layers.

    ``weights`` are those of the source.
    """

    def __init__(self, graph: onnx.GraphProto, stored: Mapping[str, Array], weights: Mapping[str, Array]) -> None:
        self._graph, self._stored, self._weights = graph, stored, weights

    def explain(self, name: str, ours: Array, theirs: Array) -> bool:
        """True if a batch normalisation turns the weight ``theirs`` with the name ``name`` into ``ours``."""
        readers = self._readers(name)
        if ours.dtype.kind != "f" or not readers or not np.isfinite(ours).all():
            return False
        if ours.ndim > 1:
            return all(self._explains_weight(node, name, ours, theirs) for node in readers)
        return all(self._explains_bias(node, name, ours, theirs) for node in readers)

    def _readers(self, name: str) -> list[onnx.NodeProto]:
        """The nodes that read ``name``. Empty if one of them takes no batch normalisation, as a look-up in a table does."""
        found = [node for node in self._graph.node if name in reads(node)]
        return found if all(node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul") for node in found) else []

    def _explains_weight(self, node: onnx.NodeProto, name: str, ours: Array, theirs: Array) -> bool:
        if name not in node.input[1:2]:
            return False
        factors = _factors(node, ours, theirs)
        if factors is None:
            return False
        live = np.isfinite(factors)  # the factor of a channel of zeros is unknown
        if factors.size == 1 or not live.any():  # the source does not list vectors of one element
            return True
        vectors, limit = self._vectors.get(factors.size, []), _limit(ours)
        return any(
            _follows(factors, scale, vectors, live, limit) for scale in (np.ones(1), *self._scales(factors.size))
        )

    def _explains_bias(self, node: onnx.NodeProto, name: str, ours: Array, theirs: Array) -> bool:
        weight = node.input[1] if len(node.input) > 2 and node.input[2] == name else ""
        made, given = self._stored.get(weight), self._weights.get(weight)
        if made is None:
            return False
        factors = _factors(node, made, given) if given is not None and made.shape == given.shape else None
        if given is None or factors is None or factors.size != ours.size:
            return True  # the weight has another name or order, so that the factors are unknown
        live = np.isfinite(factors)
        vectors = self._vectors.get(ours.size, [])
        is_unchanged = np.array_equal(made, given)
        if not live.any() or not (is_unchanged or (vectors and _is_scale(factors, vectors, live, _limit(made)))):
            return True  # one channel, or two batch normalisations in sequence
        shifts = np.stack([np.zeros(ours.size), *vectors])[:, live]
        return _is_shifted(ours[live], theirs[live].astype(np.float64), factors[live], shifts)

    @cached_property
    def _vectors(self) -> dict[int, list[Array]]:
        """The different vectors of the source, by their size."""
        found: dict[int, dict[bytes, Array]] = {}
        for array in self._weights.values():
            if array.ndim == 1 and array.dtype.kind == "f" and array.size <= _MOST_CHANNELS:
                found.setdefault(array.size, {})[array.tobytes()] = array.astype(np.float64)
        return {size: list(arrays.values()) for size, arrays in found.items()}

    def _scales(self, size: int) -> Iterator[Array]:
        """The factors of the source's batch normalisations with the usual ε, for those that follow another one."""
        for name, variance in self._weights.items():
            layer, _, last = name.rpartition(".")
            gamma = self._weights.get(f"{layer}.weight", np.ones(size))
            if last == "running_var" and variance.size == gamma.size == size:
                yield from (gamma / np.sqrt(variance.astype(np.float64) + epsilon) for epsilon in _EPSILONS)


def _factors(node: onnx.NodeProto, ours: Array, theirs: Array) -> Array | None:
    """The factor of each output channel of ``node``, NaN for channels of zeros. None if the weights are no multiples."""
    attributes = {one.name: one.i for one in node.attribute}
    groups = attributes.get("group", 1) if node.op_type == "ConvTranspose" else 1
    axis = 0 if node.op_type == "Conv" or attributes.get("transB") else 1
    one, other = (
        np.moveaxis(np.concatenate(np.split(each.astype(np.float64), groups), axis=1) if groups > 1 else each, axis, 0)
        for each in (ours, theirs)
    )
    one, other = (each.reshape(len(each), -1).astype(np.float64) for each in (one, other))
    squares = (other * other).sum(1)
    with np.errstate(all="ignore"):
        factors: Array = np.where(squares > 0, (one * other).sum(1) / squares, np.nan)
    made = np.nan_to_num(factors)[:, None] * other
    least = float(np.finfo(ours.dtype).smallest_normal)
    return factors if bool((np.abs(one - made) <= _limit(ours) * np.abs(made) + least).all()) else None


def _follows(factors: Array, scale: Array, vectors: list[Array], live: Array, limit: float) -> bool:
    """True if the ``live`` factors are ``scale``, that of another batch normalisation, multiplied by those of a second one."""
    known = live & np.broadcast_to(scale != 0, live.shape)
    with np.errstate(all="ignore"):
        rest = np.where(known, factors / scale, 1.0)
    is_zero = bool((factors[live & ~known] == 0).all())
    return is_zero and bool(known.any()) and _is_scale(rest, vectors, known, limit)


def _is_scale(factors: Array, vectors: list[Array], live: Array, limit: float) -> bool:
    """True if the ``live`` factors are γ / √(variance + ε) for two of the vectors, or γ = 1."""
    gammas = np.stack([np.ones(factors.size), *vectors])
    spread = np.flatnonzero(live)
    spread = spread[np.linspace(0, spread.size - 1, _SAMPLE).astype(np.int64)]
    for variance in (one for one in vectors if (one >= 0).all()):
        least = int(np.argmin(np.where(live, variance, np.inf)))
        places = np.append(spread, least)
        with np.errstate(all="ignore"):
            solved = (gammas[:, places] / factors[places]) ** 2 - variance[places]
            middle = np.median(np.nan_to_num(solved, nan=0.0, posinf=0.0, neginf=0.0), axis=1)
            for epsilon in (*_EPSILONS, middle, np.nan_to_num(solved[:, -1], posinf=0.0, neginf=0.0)):
                each = np.broadcast_to(np.maximum(epsilon, 0.0), len(gammas))
                made = gammas[:, places] / np.sqrt(variance[places] + each[:, None])
                near = (np.abs(made - factors[places]) <= limit * np.abs(made)).all(1)
                for index in np.flatnonzero(near):
                    whole = gammas[index] / np.sqrt(variance + each[index])
                    if (np.abs(whole - factors) <= limit * np.abs(whole))[live].all():
                        return True
    return False


def _is_shifted(ours: Array, theirs: Array, factors: Array, shifts: Array) -> bool:
    """True if ``ours`` is β + (``theirs`` - mean) · ``factors`` for two of the ``shifts``."""
    limit, least = _limit(ours), float(np.finfo(ours.dtype).smallest_normal)
    places = np.unique(np.linspace(0, ours.size - 1, _SAMPLE).astype(np.int64))
    for mean in shifts:
        moved = (theirs - mean) * factors
        scale = (np.abs(theirs) + np.abs(mean)) * np.abs(factors)

        def is_close(betas: Array, at: Array | slice, moved: Array = moved, scale: Array = scale) -> Array:
            error = np.abs(ours[at] - moved[at] - betas[:, at])
            found: Array = (error <= limit * (scale[at] + np.abs(betas[:, at])) + least).all(1)
            return found

        near = shifts[is_close(shifts, places)]
        if is_close(near, slice(None)).any():
            return True
    return False


def _limit(array: Array) -> float:
    """The relative rounding error of a weight."""
    return max(_ROUNDING, 8 * float(np.finfo(array.dtype).eps))
