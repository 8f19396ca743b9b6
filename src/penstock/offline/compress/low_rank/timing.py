"""What a layer costs, whole and split: each alone in the engine, at the shape that it has in the model, on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.offline.compress.low_rank.convolution import Form
from penstock.offline.compress.low_rank.layers import Layer, alone
from penstock.offline.compress.sessions import race
from penstock.tensor import Array

Way = tuple[Form | None, tuple[int, ...]]
"""Form and ranks; (None, ()) is the whole layer."""
WHOLE: Way = (None, ())

_SECONDS_EACH = 0.06


def measure(layer: Layer, shape: Sequence[int], ways: Sequence[Way], threads: int) -> dict[Way, float]:
    """Median milliseconds of every way to run ``layer`` on an input of ``shape``, interleaved."""
    rng = np.random.default_rng(0)
    inputs = {"x": rng.standard_normal(shape, np.float32)}
    models = {way: alone(layer, way[0], factors(layer.weight.shape, *way), shape) for way in ways}
    timings = race(models, inputs, _SECONDS_EACH * len(models), threads)
    return {way: timed.p50_ms for way, timed in timings.items()}


def factors(shape: tuple[int, ...], form: Form | None, ranks: tuple[int, ...]) -> list[Array]:
    """Random factors of the shapes that a layer of ``shape`` is split into: time does not depend on the values."""
    outputs, inputs, *kernel = shape
    ones = [1] * len(kernel)
    shapes: Sequence[Sequence[int]]
    match form:
        case None:
            shapes = [shape]
        case Form.CHANNEL:
            shapes = [[ranks[0], inputs, *kernel], [outputs, ranks[0], *ones]]
        case Form.SPATIAL:
            shapes = [[ranks[0], inputs, kernel[0], 1], [outputs, ranks[0], 1, kernel[1]]]
        case Form.TUCKER:
            shapes = [[ranks[0], inputs, *ones], [ranks[1], ranks[0], *kernel], [outputs, ranks[1], *ones]]
    rng = np.random.default_rng(0)
    return [rng.standard_normal(wanted, np.float32) for wanted in shapes]
