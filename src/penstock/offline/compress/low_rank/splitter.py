"""Collect the moments of every layer's data, and compute its factors at any rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.offline.compress.low_rank import convolution
from penstock.offline.compress.low_rank.convolution import SplitForm, Way
from penstock.offline.compress.low_rank.layers import SplittableLayer
from penstock.offline.compress.low_rank.matrix import Decomposition, Moments, Split, decompose
from penstock.offline.compress.taps import Progress, Taps
from penstock.tensor import Array

_ROWS = 4096
"""Rows per batch of a tensor that enter its moments, evenly spaced. Neighbouring pixels are nearly redundant."""


class Splitter:
    """Splits layers by the moments that ``observe`` collected, or by their weights alone.

    Takes 8 · min(outputs, inputs)² bytes a layer for moments (convolutions: the sum of both squares), and 16 bytes a weight for
    cached decompositions.
    """

    def __init__(self, layers: Mapping[str, SplittableLayer]) -> None:
        self._layers = layers
        self._results: dict[str, Moments] = {}
        self._sources: dict[tuple[str, int], Moments] = {}
        self._decompositions: dict[tuple[str, SplitForm], Decomposition] = {}
        self._errors: dict[tuple[str, Way], float] = {}

    def observe(self, taps: Taps, progress: Progress) -> None:
        """Collect the moments of each layer's results or, if it has fewer channels, of its input; for convolutions of both."""
        wanted: dict[str, list[tuple[Moments, int, Array | None]]] = {}
        for layer in self._layers.values():
            outputs, inputs, *kernel = layer.weight.shape
            if kernel or outputs <= inputs:
                moments = self._results[layer.name] = Moments(outputs)
                wanted.setdefault(layer.name, []).append((moments, layer.axis, layer.bias))
            if (kernel or outputs > inputs) and (layer.source, layer.axis) not in self._sources:
                moments = self._sources[layer.source, layer.axis] = Moments(inputs)
                wanted.setdefault(layer.source, []).append((moments, layer.axis, None))
        for name, array in taps.run(list(wanted), progress):
            for moments, axis, bias in wanted[name]:
                rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
                rows = rows[:: max(1, len(rows) // _ROWS)]
                moments.update(rows if bias is None else rows - bias)

    def split(self, name: str, form: SplitForm, ranks: tuple[int, ...]) -> Split:
        layer = self._layers[name]
        match form:
            case SplitForm.CHANNEL:
                return self._decomposition(name, form).at(ranks[0], layer.kernel)
            case SplitForm.SPATIAL:
                return convolution.spatial_split(self._decomposition(name, form), ranks[0], layer.weight.shape)
            case SplitForm.TUCKER:
                return self._tucker(name, ranks)[0]

    def error(self, name: str, form: SplitForm, ranks: tuple[int, ...]) -> float:
        """Estimated relative error of the layer's results; of its weights if there are no moments."""
        key = (name, (form, ranks))
        if key not in self._errors:
            if form is SplitForm.TUCKER:
                self._errors[key] = self._tucker(name, ranks)[1]
            else:
                self._errors[key] = self._decomposition(name, form).error(ranks[0])
        return self._errors[key]

    def describe(self, name: str, way: Way) -> dict[str, Any]:
        form, ranks = way
        assert form is not None
        layer = self._layers[name]
        return {
            "form": form.value,
            "ranks": list(ranks),
            "shape": list(layer.weight.shape),
            "weights": round(convolution.products(layer.weight.shape, form, ranks) / layer.weight.size, 4),
            "error": round(self.error(name, form, ranks), 6),
        }

    def _decomposition(self, name: str, form: SplitForm) -> Decomposition:
        if (name, form) not in self._decompositions:
            layer = self._layers[name]
            outputs, inputs, *kernel = layer.weight.shape
            if form is SplitForm.SPATIAL:
                found = convolution.spatial(layer.weight, self._sources.get((layer.source, layer.axis)))
            else:
                of_results = bool(kernel) or outputs <= inputs
                moments = self._results.get(name) if of_results else self._sources.get((layer.source, layer.axis))
                matrix = layer.weight.reshape(outputs, -1)
                found = decompose(matrix, moments, of_results=of_results, centred=layer.bias is not None)
            self._decompositions[name, form] = found
        return self._decompositions[name, form]

    def _tucker(self, name: str, ranks: tuple[int, ...]) -> tuple[Split, float]:
        layer = self._layers[name]
        moments = self._sources.get((layer.source, layer.axis)), self._results.get(name)
        return convolution.tucker(layer.weight, (ranks[0], ranks[1]), *moments)
