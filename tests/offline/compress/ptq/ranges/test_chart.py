from __future__ import annotations

import re

import numpy as np
import pytest

from penstock.errors import InvalidArgument
from penstock.offline.compress.ptq.ranges.chart import range_chart
from penstock.offline.compress.ptq.ranges.histogram import Histogram, Range, TensorStatistics
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import Array, DataType

SCHEMES = [
    IntegerScheme(DataType.UINT8, DataType.INT8, False, "unsigned"),
    IntegerScheme(DataType.INT8, DataType.INT8, False, "signed"),
]


def statistics(values: Array, **about: object) -> TensorStatistics:
    histogram = Histogram()
    histogram.update(values.astype(np.float32))
    return TensorStatistics(histogram, **about)  # type: ignore[arg-type]


def points(picture: str) -> dict[str, list[tuple[float, float]]]:
    """(threshold in percent, divergence) of each series."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, up, across in re.findall(r"<title>([^:<]+): (\S+) KL divergence at \D+ (\d+)%</title>", picture):
        found.setdefault(name, []).append((float(across), float(up)))
    return found


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.reason)
def test_entropy_cuts_where_the_curve_is_lowest(scheme: IntegerScheme) -> None:
    values = np.abs(np.random.default_rng(0).standard_normal(20_000)) ** 3
    found = points(range_chart({"t": statistics(values)}, scheme))
    assert min(up for _, up in found["KL divergence"]) >= found["entropy"][0][1] * 0.99
    assert found["min-max"][0][0] == 100
    assert len(found["KL divergence"]) > 50


def test_the_tensor_on_which_methods_disagree_most() -> None:
    rng = np.random.default_rng(0)
    calm, wild = rng.uniform(-1, 1, 5000), rng.standard_normal(5000) ** 5
    known = {"calm": statistics(calm), "wild": statistics(wild)}
    assert "threshold of wild" in range_chart(known, SCHEMES[1])
    assert "threshold of calm" in range_chart(known, SCHEMES[1], "calm")


def test_tensors_without_a_choice() -> None:
    values = np.random.default_rng(0).standard_normal(5000)
    known = {
        "fixed": statistics(values, fixed=Range(0.0, 1.0)),
        "scores": statistics(values, clippable=False),
        "constant": statistics(np.ones(10)),
        "none": TensorStatistics(Histogram()),
    }
    with pytest.raises(InvalidArgument, match="no tensor of the model has a range to choose"):
        range_chart(known, SCHEMES[1])
    for name in (*known, "unknown"):
        with pytest.raises(InvalidArgument, match=f"tensor '{name}' has no range"):
            range_chart(known, SCHEMES[1], name)
