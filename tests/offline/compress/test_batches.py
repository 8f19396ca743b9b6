"""Calibration data in batches of any size and any shapes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import networks
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, InvalidData, ResourceExhausted
from penstock.offline.compress import taps
from penstock.offline.compress.batches import CalibrationBatches
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.ranges.histogram import TensorStatistics
from penstock.offline.sessions import signature_of
from penstock.tensor import Array

NAMES = ["x", "doubled", "kept"]


def exact() -> Artifact:
    """x (N, length, 4) to y (N, length, 2): the tensors in ``NAMES`` are bit-identical in batches of any size."""
    n = networks.Network()
    kept = n.op("Relu", n.op("Add", "x", "x", name="doubled"), name="kept")
    n.op("MatMul", kept, n.normal(4, 2), name="y")
    return n.artifact({"x": ["N", "length", 4]}, {"y": ["N", "length", 2]})


EXACT = exact()


class Reader:
    """Batches that are created on request."""

    def __init__(self, *batches: Array) -> None:
        self._batches = batches
        self.passes = 0

    def __iter__(self) -> Iterator[dict[str, Array]]:
        self.passes += 1
        for batch in self._batches:
            yield {"x": batch.copy()}


def counts(statistics: dict[str, TensorStatistics]) -> dict[str, object]:
    return {
        name: (h.counts.tolist(), h.zeros, h.count, h.min, h.max, h.exponent)
        for name, h in ((name, known.histogram) for name, known in statistics.items())
    }


def samples(count: int, length: int = 3, scale: float = 1.0) -> Array:
    return (np.random.default_rng(count).standard_normal((count, length, 4)) * scale).astype(np.float32)


@given(
    borders=st.lists(st.integers(1, 19), max_size=6),
    batch_size=st.integers(1, 25),
    factors=st.lists(st.sampled_from([0.0, 1e-6, 1.0, 37.0, 1e9]), min_size=20, max_size=20),
)
def test_histograms_do_not_depend_on_how_the_data_are_cut(
    borders: list[int], batch_size: int, factors: list[float]
) -> None:
    x = samples(20) * np.float32(factors)[:, None, None]
    parts = np.split(x, sorted(set(borders)))
    whole = collect(EXACT, {"x": x}, NAMES, batch_size=20)
    assert counts(collect(EXACT, [{"x": part} for part in parts], NAMES, batch_size)) == counts(whole)


def test_shapes_may_differ_from_batch_to_batch() -> None:
    batches = [samples(2, 5), samples(7, 1), samples(1, 11)]
    found = collect(EXACT, Reader(*batches), ["x", "y"], batch_size=3)
    assert found["x"].histogram.count == sum(batch.size for batch in batches)
    assert found["y"].histogram.count == sum(batch.size for batch in batches) // 2


def test_the_survey_counts_batches_and_finds_the_largest() -> None:
    reader = Reader(samples(2, 5), samples(7, 4), samples(1, 11))
    batches = CalibrationBatches(signature_of(EXACT), reader, 3)
    assert batches.count == 1 + 3 + 1 == len(list(batches))
    assert batches.largest.inputs["x"].shape == (3, 4, 4)
    few, rows = batches.fewest()
    assert (few["x"].shape, rows) == ((1, 4, 4), 1)
    assert reader.passes == 1


def test_a_model_of_fixed_batch_gets_its_own_from_every_part() -> None:
    model = networks.cnn(8, batch=2)
    parts = [{"x": networks.images(4)}, {"x": networks.images(2)}]
    calls = [{"x": part["x"][at : at + 2]} for part in parts for at in range(0, len(part["x"]), 2)]
    assert [len(batch.samples) for batch in CalibrationBatches(signature_of(model), calls, 32)] == [2, 2, 2]
    with pytest.raises(InvalidData, match=r"sample 1 of the data: .*\[3, 3, 12, 12\]"):
        collect(model, [calls[0], {"x": networks.images(3)}])


def test_the_digest_is_of_values_and_order() -> None:
    def digest(*batches: Array) -> str:
        return CalibrationBatches(signature_of(EXACT), Reader(*batches), 32).data.digest

    assert digest(samples(3), samples(4)) == digest(samples(3), samples(4))
    assert digest(samples(3), samples(4)) != digest(samples(4), samples(3))
    assert digest(samples(3)) != digest(samples(3) + 1)


def test_data_that_can_be_had_only_once_or_are_none() -> None:
    assert counts(collect(EXACT, iter([{"x": samples(3)}]))) == counts(collect(EXACT, {"x": samples(3)}))
    with pytest.raises(InvalidArgument, match="at least 1, got 0"):
        collect(EXACT, {"x": samples(3)}, batch_size=0)
    with pytest.raises(InvalidData, match="has no samples"):
        collect(EXACT, [])
    with pytest.raises(InvalidData, match="sample 1 of the data: .*shape"):
        collect(EXACT, [{"x": samples(3)}, {"x": samples(3)[..., :2]}])


def test_nan_names_the_samples() -> None:
    n = networks.Network()
    n.op("MatMul", n.op("Log", "x", name="logarithm"), n.normal(4, 2), name="y")
    model = n.artifact({"x": ["N", 4]}, {"y": ["N", 2]})
    x = np.ones((40, 4), np.float32)
    x[[7, 33]] = -1
    with pytest.raises(InvalidData, match=r"tensor 'logarithm' becomes NaN or infinite in sample\(s\) 7 \("):
        collect(model, {"x": x}, batch_size=16)
    x[8:15] = -1
    with pytest.raises(InvalidData, match=r"in sample\(s\) 7, 8, 9, 10, 11 and 3 more \("):
        collect(model, {"x": x}, batch_size=16)


def test_nan_in_a_tensor_without_samples_names_the_batch() -> None:
    n = networks.Network()
    total = n.op("ReduceSum", n.op("Log", "x"), keepdims=0, name="total")
    n.op("MatMul", n.op("Add", "x", total, name="shifted"), n.normal(4, 2), name="y")
    model = n.artifact({"x": ["N", 4]}, {"y": ["N", 2]})
    x = np.ones((10, 4), np.float32)
    x[9] = -1
    with pytest.raises(InvalidData, match="'total' becomes NaN or infinite in samples 5 to 9"):
        collect(model, {"x": x}, ["total"], batch_size=5)


def test_outputs_of_one_batch_are_gone_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, alive = taps.loaded, list[weakref.ref[Array]]()

    @contextlib.contextmanager
    def watched(*arguments: Any, **options: Any) -> Iterator[Any]:
        with loaded(*arguments, **options) as model:

            def watch(inputs: dict[str, Array]) -> dict[str, Array]:
                assert all(output() is None for output in alive)
                outputs = model.forward(inputs)
                alive[:] = [weakref.ref(array) for array in outputs.values()]
                return outputs

            yield SimpleNamespace(forward=watch)

    monkeypatch.setattr(taps, "loaded", watched)
    collect(networks.cnn(8), {"x": networks.images(9)}, batch_size=3)
    assert alive


def test_what_would_not_fit_in_memory_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = networks.cnn(32), {"x": networks.images(16)}
    # The largest tensor is 32 × 12 × 12 FP32: 18,432 bytes a sample.
    monkeypatch.setattr(taps, "usable_memory", lambda: 4 * 18_432 * 5)
    with pytest.raises(ResourceExhausted, match="'conv.*'|'stem'") as caught:
        collect(model, data, batch_size=16)
    assert "batches of at most 5" in caught.value.hint
    collect(model, data, batch_size=5)
    monkeypatch.setattr(taps, "usable_memory", lambda: 1000)
    with pytest.raises(ResourceExhausted, match="1 sample") as caught:
        collect(model, data, batch_size=1)
    assert "more memory" in caught.value.hint
    monkeypatch.setattr(taps, "usable_memory", lambda: 0)  # unknown
    collect(model, data, batch_size=16)
