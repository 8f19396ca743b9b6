from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import models
from penstock.engines.registry import get_engine
from penstock.measurement import LatencyPoint
from penstock.perf.profile import BATCHES, knee, profile, rows_per_second
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel


def points(*latencies: float) -> list[LatencyPoint]:
    """Latencies of batches 1, 2, 4 …, p99 twice the p50."""
    return [LatencyPoint(2**index, ms, 2 * ms) for index, ms in enumerate(latencies)]


def test_throughput_counts_rows() -> None:
    assert rows_per_second(LatencyPoint(8, p50_ms=2.0, p99_ms=9.0)) == pytest.approx(4000)


def test_the_knee_is_the_smallest_batch_near_the_best_throughput() -> None:
    # Rows per ms with the hand-over: 0.91, 1.48, 1.87, 1.95, 1.88.
    assert knee(points(1, 1.25, 2.04, 4.0, 8.4)).batch == 4


def test_a_latency_bound_excludes_slow_batches() -> None:
    profiled = points(1, 1.25, 2.04, 4.0)
    assert knee(profiled, p99_ms=2.5).batch == 2
    assert knee(profiled, p99_ms=2.4).batch == 1
    assert knee(profiled, p99_ms=0.1).batch == 1


def test_short_calls_are_batched_for_the_sake_of_the_hand_over() -> None:
    assert knee(points(0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)).batch == 32


def test_batching_that_does_not_pay_stays_at_one() -> None:
    assert knee(points(10, 20, 40, 80)).batch == 1
    assert knee(points(3)).batch == 1


def repeated(width: int) -> Callable[[int], dict[str, np.ndarray]]:
    return lambda batch: {"x": np.ones((batch, width), np.float32)}


def test_models_are_profiled_at_every_batch_against_one_another() -> None:
    one, two = FakeModel(), FakeModel()
    seen: list[int] = []
    found = profile({"one": one, "two": two}, repeated(2), 10.0, (1, 4), seen.append)
    assert [point.batch for point in found["one"]] == [point.batch for point in found["two"]] == [1, 4] == seen
    for model in (one, two):
        assert {len(call["x"]) for call in model.calls} == {1, 4}
    assert all(0 < point.p50_ms <= point.p99_ms for point in found["one"])


def test_batches_too_slow_for_the_budget_are_left_out() -> None:
    model = FakeModel()
    found = profile({"slow": model}, repeated(2), budget_s=0.0)
    assert [point.batch for point in found["slow"]] == [1]


@pytest.mark.parametrize("batch", [1, 4])
def test_a_fixed_batch_is_profiled_as_it_is(batch: int) -> None:
    spec = TensorSpec("x", DataType.FP32, (batch, 2))
    model = FakeModel(Signature((spec,), (TensorSpec("y", DataType.FP32, (batch, 2)),)))
    found = profile({"fixed": model}, repeated(2), 0.1)
    assert [point.batch for point in found["fixed"]] == [batch]
    assert {call["x"].shape for call in model.calls} == {(batch, 2)}


def test_a_real_model_has_a_profile() -> None:
    model = get_engine("onnxruntime").load(models.linear(3, 2), {"threads": 1})
    found = profile({"linear": model}, repeated(3), 0.2)
    assert [point.batch for point in found["linear"]][:2] == list(BATCHES[:2])
