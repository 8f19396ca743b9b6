"""The comparison of two models."""

from __future__ import annotations

import numpy as np
import pytest

from networks import mlp
from penstock.dataset import make_dataset
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.judge.judge import Judge
from penstock.resources import machine_facts

X = {"x": np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)}


@pytest.mark.parametrize("rows", [1, 8])
def test_int8_against_fp32(rows: int) -> None:
    original, scheme = mlp(), integer_scheme(machine_facts())
    compressed = quantize(original, ranges(collect(original, X), RangeMethod.MIN_MAX, scheme), scheme)
    found = Judge(original, make_dataset(X, None)).compare(compressed, rows=rows, budget_s=0.1)
    assert found.size_ratio == pytest.approx(original.size_bytes / compressed.size_bytes)
    assert found.size_ratio > 1
    assert found.accuracy.metric == "agreement"
    assert 0 < found.accuracy.relative_error < 0.1
    assert found.original_accuracy == 1
    assert found.speedup.low <= found.speedup.value <= found.speedup.high
    assert found.speedup.value == pytest.approx(found.original_ms / found.compressed_ms, rel=0.5)
    assert found.rows == rows


def test_a_model_against_itself_loses_nothing() -> None:
    found = Judge(mlp(), make_dataset(X, np.arange(40) % 4)).compare(mlp(), budget_s=0.1)
    assert found.accuracy.loss.value == found.accuracy.relative_error == 0
    assert found.accuracy.metric == "top-1"
    assert found.size_ratio == 1
