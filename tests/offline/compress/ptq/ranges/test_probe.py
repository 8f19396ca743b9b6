"""A quantised model with changed ranges gives nearly the outputs of a model quantised with these ranges."""

from __future__ import annotations

import numpy as np
import pytest

import networks
from penstock.dataset import make_dataset
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.probe import RangeProbe
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.judge.accuracy import answers_of
from penstock.offline.judge.metrics import output_errors
from penstock.tensor import DataType

DATA = make_dataset({"x": np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)}, None)


@pytest.mark.parametrize("placement", list(QdqPlacement))
@pytest.mark.parametrize("activation", [DataType.UINT8, DataType.INT8])
def test_other_ranges_answer_as_if_they_had_been_written(placement: QdqPlacement, activation: DataType) -> None:
    model, scheme = networks.mlp(), IntegerScheme(activation, DataType.INT8, False, "test")
    statistics = collect(model, DATA)
    first, other = (
        ranges(statistics, method, scheme, 90.0) for method in (RangeMethod.MIN_MAX, RangeMethod.PERCENTILE)
    )
    probe = RangeProbe(quantize(model, first, scheme, placement), scheme)
    for found in (other, first):
        written = quantize(model, found, scheme, placement)
        wanted = answers_of(written, DATA, as_written=True)
        assert output_errors(wanted, probe.answers(found, DATA, 1, 32))["y"] < 0.01
    spoiled = output_errors(answers_of(model, DATA), probe.answers(other, DATA, 1, 32))["y"]
    assert spoiled > output_errors(answers_of(model, DATA), probe.answers(first, DATA, 1, 32))["y"]
