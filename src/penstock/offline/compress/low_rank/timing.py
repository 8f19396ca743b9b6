"""Times of a layer, whole and split: each runs alone in the engine, with the layer's shape in the model, on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.offline.compress.low_rank.convolution import SplitForm, factor_shapes
from penstock.offline.compress.low_rank.layers import SplittableLayer, alone
from penstock.offline.judge.race import race
from penstock.tensor import Array

Way = tuple[SplitForm | None, tuple[int, ...]]
"""Form and ranks; (None, ()) is the whole layer."""
WHOLE: Way = (None, ())

_SECONDS_EACH = 0.06


def measure(layer: SplittableLayer, shape: Sequence[int], ways: Sequence[Way], threads: int) -> dict[Way, float]:
    """Median milliseconds of every way to run ``layer`` on an input of ``shape``, interleaved.

    Its factors are random: time does not depend on the values.
    """

    def random(shape: Sequence[int]) -> Array:
        return np.random.default_rng(0).standard_normal(shape, np.float32)

    inputs = {"x": random(shape)}
    models = {
        way: alone(layer, way[0], [random(factor) for factor in factor_shapes(layer.weight.shape, *way)], shape)
        for way in ways
    }
    timings = race(models, inputs, _SECONDS_EACH * len(models), threads)
    return {way: timed.p50_ms for way, timed in timings.items()}
