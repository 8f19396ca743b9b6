"""Signal-to-quantisation-noise ratio of tensors, by the source of the noise: clipping or rounding.

SQNR = 10·log10(Σ x² / Σ (x - x̂)²). For activations, the sums are integrals over the calibration histogram, with the values spread
evenly within each bin. The quantisation error is piecewise linear, so the integrals are exact. The integral of the squared rounding
error over one step Δ is Δ³/12. The integral of the squared clipping error over an excess from 0 to x is x³/3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import onnx

from penstock.offline.compress.ptq.qdq_placement import LINEAR_OPS, FloatModel, output_axis
from penstock.offline.compress.ptq.ranges.histogram import Histogram, Range, TensorStatistics
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.optimize.mapped import array_of
from penstock.tensor import Array

_MOST_DB = 200.0
"""The largest ratio reported, since JSON has no infinity."""


class Noise(msgspec.Struct, frozen=True):
    """Mean squares of a tensor's values and of its quantisation noise."""

    signal: float
    clipping: float
    """The noise from values beyond the range of the integers."""
    rounding: float

    @property
    def sqnr_db(self) -> float:
        """The ratio in decibels, at most 200. A tensor that fills its range evenly has about 6 dB per bit."""
        noise = self.clipping + self.rounding
        if noise <= self.signal * 10 ** (-_MOST_DB / 10):
            return _MOST_DB
        return max(-_MOST_DB, 10 * math.log10(max(self.signal, 1e-300) / noise))

    @property
    def clipping_share(self) -> float:
        """The fraction of the noise that comes from clipping."""
        noise = self.clipping + self.rounding
        return self.clipping / noise if noise > 0 else 0.0


class TensorNoise(msgspec.Struct, frozen=True):
    """The noise of one tensor."""

    tensor: str
    sqnr_db: float
    clipping_share: float
    """See ``Noise.clipping_share``."""


def noisiest(noises: Mapping[str, Noise]) -> TensorNoise | None:
    """The tensor with the lowest SQNR; None if ``noises`` is empty."""
    if not noises:
        return None
    name = min(noises, key=lambda name: noises[name].sqnr_db)
    return TensorNoise(name, noises[name].sqnr_db, noises[name].clipping_share)


def activation_noise(
    statistics: Mapping[str, TensorStatistics], ranges: Mapping[str, Range], scheme: IntegerScheme
) -> dict[str, Noise]:
    """The noise of every tensor that has a range and a non-empty histogram. Tensors with a fixed range have no histogram."""
    return {
        name: histogram_noise(known.histogram, ranges[name], scheme)
        for name, known in statistics.items()
        if name in ranges and known.histogram.count
    }


def histogram_noise(histogram: Histogram, range: Range, scheme: IntegerScheme) -> Noise:
    """The noise of quantising a tensor with this non-empty histogram to ``range``."""
    filled = np.flatnonzero(histogram.counts)
    edges = np.clip(histogram.edges, histogram.min, histogram.max)
    low, high = edges[filled], edges[filled + 1]
    shares = histogram.counts[filled] / histogram.count
    signal = (low * low + low * high + high * high) / 3
    smallest, largest = scheme.activation_limits
    if range.high <= range.low:  # the tensor was always zero, which is exact
        return Noise(float(shares @ signal), float(shares @ signal), 0.0)
    step, zero_point = (float(number) for number in scheme.parameters(np.array(range.low), np.array(range.high)))
    first, last = (smallest - zero_point) * step, (largest - zero_point) * step
    # A difference of integrals over a tiny interval would suffer from cancellation.
    middle, reach = (low + high) / 2, np.maximum(high - low, 1e-6 * step) / 2
    low, high = middle - reach, middle + reach

    # Antiderivatives of the squared error.
    def excess(x: Array) -> Array:
        return np.asarray(np.clip(x - last, 0, None) ** 3 - np.clip(first - x, 0, None) ** 3) / 3

    def remainder(x: Array) -> Array:
        steps = np.clip(x, first, last) / step
        whole = np.round(steps)
        return np.asarray(step**3 * (whole / 12 + (steps - whole) ** 3 / 3))

    clipping, rounding = (shares @ ((f(high) - f(low)) / (high - low)) for f in (excess, remainder))
    return Noise(float(shares @ signal), max(0.0, float(clipping)), max(0.0, float(rounding)))


def weight_noise(model: FloatModel, nodes: Iterable[onnx.NodeProto], scheme: IntegerScheme) -> dict[str, Noise]:
    """The noise of the weights of the products among ``nodes``. Each output channel is scaled by its largest magnitude."""
    found: dict[str, Noise] = {}
    for node in nodes:
        tensor = model.weights.get(node.input[1]) if node.op_type in LINEAR_OPS else None
        if tensor is not None and tensor.name not in found:
            weight, axis = array_of(tensor), output_axis(node)
            is_stack = node.op_type == "MatMul" and weight.ndim > 2
            found[tensor.name] = channel_noise(weight[None] if is_stack else weight, 0 if is_stack else axis, scheme)
    return found


def channel_noise(weight: Array, axis: int, scheme: IntegerScheme) -> Noise:
    """The noise of rounding to symmetric signed bytes with a scale for each index along ``axis``."""
    channels = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).astype(np.float64)
    steps = np.abs(channels).max(axis=1, keepdims=True, initial=0.0) / scheme.weight_limit
    steps[steps == 0] = 1.0
    error = np.round(channels / steps) * steps - channels
    return Noise(float((channels**2).mean()), 0.0, float((error**2).mean()))
