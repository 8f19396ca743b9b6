"""A deep network in which it is known which layers INT8 spoils: channels of a few are a hundred times as large as the others."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.offline.compress.precision.groups import MixedModel
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge
from penstock.tensor import DataType

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, False, "test")


def spoiled(blocks: Sequence[int], layers: int = 5, width: int = 8, factor: float = 100.0) -> Artifact:
    """x (N, 1, 6, 6) to y (N, 10): ``layers`` blocks of two convolutions around a sum. Between the two of each block in ``blocks``
    one channel is ``factor`` times as large, and its reader's weights as much smaller; those blocks have no way around them.
    """
    rng = np.random.default_rng(0)
    n = Network(0)
    x = n.op("Relu", n.conv("x", 1, width))
    for block in range(layers):
        scale = np.ones((width, 1, 1, 1), np.float32)
        scale[0] = factor if block in blocks else 1
        first, second = (rng.normal(0, (9 * width / 2) ** -0.5, (width, width, 3, 3)).astype(np.float32) for _ in "12")
        bias = rng.normal(0, 0.1, width).astype(np.float32)
        y = n.op(
            "Conv", x, n.weight(first * scale), n.weight(bias * scale[:, 0, 0, 0]), pads=[1] * 4, name=f"wide{block}"
        )
        y = n.op("Relu", y)
        y = n.op("Conv", y, n.weight(second / scale[:, 0][None]), n.weight(bias), pads=[1] * 4, name=f"narrow{block}")
        x = n.op("Relu", y if block in blocks else n.op("Add", x, y))
    n.gemm(n.op("Flatten", x), 36 * width, 10, name="y")
    return n.artifact({"x": ["N", 1, 6, 6]}, {"y": ["N", 10]})


def samples(count: int, seed: int) -> Dataset:
    """Images for ``spoiled``, without labels."""
    return make_dataset({"x": np.random.default_rng(seed).standard_normal((count, 1, 6, 6), np.float32)}, None)


@functools.cache
def trials(blocks: tuple[int, ...] = (4,), layers: int = 5, placement: QdqPlacement = QdqPlacement.LINEAR) -> Trials:
    """Shared among tests, so that each version is run once."""
    model = spoiled(blocks, layers)
    statistics = collect(model, samples(32, 1).inputs)
    mixed = MixedModel(model, statistics, SCHEME, placement, RangeMethod.MIN_MAX)
    return Trials(mixed, Judge(model, samples(200, 2), contract=Contract(metric="agreement")))
