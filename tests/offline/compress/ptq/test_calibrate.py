"""Calibration on real models: correct numbers, constant memory, clear errors."""

from __future__ import annotations

import tracemalloc

import numpy as np
import onnx
import pytest

import networks
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument, InvalidData, Unsupported
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.ranges.histogram import TensorStatistics
from penstock.offline.model_store import keep_models


def counts(statistics: dict[str, TensorStatistics]) -> dict[str, tuple[int, int, list[int]]]:
    return {
        name: (known.histogram.count, known.histogram.zeros, known.histogram.counts.tolist())
        for name, known in statistics.items()
    }


def test_histograms_are_those_of_the_tensors() -> None:
    artifact, x = networks.cnn(), networks.images(10)
    found = collect(artifact, {"x": x}, batch_size=4)
    proto = onnx.load_model_from_string(artifact.data)
    proto.graph.output.append(onnx.helper.make_tensor_value_info("stem", 1, None))
    model = get_engine("onnxruntime").load(
        Artifact.from_bytes(proto.SerializeToString()), {"threads": 1, "graph_level": "disabled"}
    )
    outputs = model.forward({"x": x})
    for name, tensor in {"x": x, "stem": outputs["stem"], "y": outputs["y"]}.items():
        histogram = found[name].histogram
        assert histogram.count == tensor.size
        assert histogram.zeros == np.count_nonzero(tensor == 0)
        assert histogram.min == pytest.approx(tensor.min(), rel=1e-5)
        assert histogram.max == pytest.approx(tensor.max(), rel=1e-5)
    assert not found["y"].clippable
    assert found["stem"].clippable


def test_groups_do_not_change_the_result() -> None:
    artifact, data = networks.cnn(8), {"x": networks.images(7)}
    together = collect(artifact, data, batch_size=3)
    one_by_one = collect(artifact, data, batch_size=3, memory_bytes=1)
    assert counts(one_by_one) == counts(together)


def test_last_batch_may_be_short() -> None:
    data = {"x": networks.images(7)}
    assert collect(networks.cnn(8), data, batch_size=3)["y"].histogram.count == 70


def test_fixed_batch_is_fed_as_it_is() -> None:
    found = collect(networks.cnn(8, batch=2), {"x": networks.images(6)})
    assert found["y"].histogram.count == 60
    with pytest.raises(InvalidData, match="exactly 2 samples"):
        collect(networks.cnn(8, batch=2), {"x": networks.images(5)})


def test_chosen_tensors_only() -> None:
    assert list(collect(networks.cnn(8), {"x": networks.images(2)}, ["stem"])) == ["stem"]
    with pytest.raises(InvalidArgument, match="'nonsense' is not an FP32 tensor"):
        collect(networks.cnn(8), {"x": networks.images(2)}, ["nonsense"])


def test_ranges_known_beforehand_are_not_collected() -> None:
    x = np.random.default_rng(0).standard_normal((4, 5, 32)).astype(np.float32)
    found = collect(networks.attention(), {"x": x})
    assert found["shares"].fixed is not None
    assert found["shares"].histogram.count == 0
    assert not found["scores"].clippable


def test_progress_ends_at_the_total() -> None:
    seen: list[tuple[int, int]] = []
    collect(networks.mlp(), {"x": np.ones((10, 16), np.float32)}, batch_size=4, progress=lambda *s: seen.append(s))
    done, totals = zip(*seen, strict=True)
    assert list(done) == list(range(1, totals[0] + 1))
    assert set(totals) == {done[-1]}


_BYTES_PER_SAMPLE = 100
"""For the digest and the numbers of a sample."""


def test_memory_does_not_grow_with_samples() -> None:
    artifact = networks.cnn(8)

    def peak_bytes(samples: int) -> int:
        data = {"x": networks.images(samples)}
        tracemalloc.start()
        try:
            collect(artifact, data, batch_size=10)
            return tracemalloc.get_traced_memory()[1] - data["x"].nbytes
        finally:
            tracemalloc.stop()

    peak_bytes(10)  # imports and caches
    few, many = (peak_bytes(samples) + networks.images(samples).nbytes for samples in (10, 1000))
    assert many <= 1.1 * few + _BYTES_PER_SAMPLE * 1000


def test_nan_is_refused_with_the_tensor_that_has_it() -> None:
    n = networks.Network()
    n.gemm(n.op("Log", "x", name="logarithm"), 4, 2, name="y")
    artifact = n.artifact({"x": ["N", 4]}, {"y": ["N", 2]})
    with pytest.raises(InvalidData, match="tensor 'logarithm'.*NaN"):
        collect(artifact, {"x": np.full((3, 4), -1, np.float32)})


def test_data_that_do_not_fit_are_refused() -> None:
    artifact = networks.mlp()
    with pytest.raises(InvalidData, match="no array for input"):
        collect(artifact, {"wrong": np.ones((3, 16), np.float32)})
    with pytest.raises(InvalidData, match="FP32"):
        collect(artifact, {"x": np.ones((3, 16), np.float64)})
    with pytest.raises(InvalidData, match="shape"):
        collect(artifact, {"x": np.ones((3, 17), np.float32)})
    with pytest.raises(InvalidData, match="no samples"):
        collect(artifact, {"x": np.ones((0, 16), np.float32)})
    with pytest.raises(InvalidArgument, match="batch size"):
        collect(artifact, {"x": np.ones((3, 16), np.float32)}, batch_size=0)


def test_nothing_to_quantise_is_unsupported() -> None:
    n = networks.Network()
    n.op("Add", "x", "x", name="y")
    with pytest.raises(Unsupported, match="no operator to quantise"):
        collect(n.artifact({"x": ["N", 2]}, {"y": ["N", 2]}), {"x": np.ones((3, 2), np.float32)})


def test_every_tensor_of_the_widest_placement_is_covered() -> None:
    found = collect(networks.cnn(8), {"x": networks.images(2)})
    assert len(found) == 12


def test_statistics_are_kept_within_the_memory_of_a_build() -> None:
    """Besides two sessions of 32 MiB, 8 MiB hold at most 42 sets of six histograms of 32 KiB."""
    artifact = networks.mlp(8)
    sets = [make_dataset({"x": np.full((2, 16), value, np.float32)}, None) for value in range(1, 61)]
    with keep_models(72 << 20) as store:
        for data in [*sets, sets[-1], sets[0]]:
            collect(artifact, data)
        assert store.made["statistics"] == len(sets) + 1
