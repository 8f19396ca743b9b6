"""Calibration data that resemble the evaluation data, and data that differ from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import networks
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidData
from penstock.offline.compress.ptq.drift import Drift, about, compare_histograms, find_drift, shift_warnings
from penstock.offline.compress.ptq.ranges.histogram import Histogram
from penstock.tensor import Array


def histogram(values: Array) -> Histogram:
    found = Histogram()
    found.update(values.astype(np.float32))
    return found


def drift(old: Array, new: Array) -> Drift:
    return compare_histograms("t", histogram(old), histogram(new), (old.size, new.size))


def psi(old: Array, new: Array) -> float:
    """The definition: tenths of the old values, counted in each."""
    edges = np.quantile(old, np.arange(1, 10) / 10)
    c, e = (np.bincount(np.searchsorted(edges, values), minlength=10) + 0.5 for values in (old, new))
    c, e = c / c.sum(), e / e.sum()
    return float(((e - c) * np.log(e / c)).sum())


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("scale", [0.25, 1.0, 3.0])
def test_psi_is_that_of_the_definition(shift: float, scale: float) -> None:
    rng = np.random.default_rng(0)
    old, new = rng.standard_normal(20_000), rng.standard_normal(20_000) * scale + shift
    found = drift(old, new)
    # The histogram's bins are some thousandths of a tenth wide.
    assert found.psi == pytest.approx(psi(old, new), rel=0.03, abs=0.002)
    assert found.calibration_median == pytest.approx(np.median(old), abs=0.01)
    assert found.evaluation_median == pytest.approx(np.median(new), abs=0.01)
    assert found.is_shifted == (found.psi > 0.25 or found.beyond > 0.001)


@given(
    seed=st.integers(0, 10_000),
    sizes=st.tuples(st.integers(2, 300), st.integers(2, 300)),
    zeros=st.floats(0, 0.95),
    power=st.integers(-20, 20),
)
def test_one_population_is_alike_at_any_size(seed: int, sizes: tuple[int, int], zeros: float, power: int) -> None:
    rng = np.random.default_rng(seed)

    def draw(count: int) -> Array:
        values = rng.standard_normal((count, 50)) * (rng.random((count, 50)) >= zeros) * 2.0**power
        return values.ravel()

    old, new = (histogram(draw(count)) for count in sizes)
    assert compare_histograms("t", old, new, sizes).psi <= compare_histograms("t", old, new, sizes).threshold


def test_values_never_seen_are_counted() -> None:
    found = drift(
        np.linspace(-1, 1, 1000), np.concatenate([np.linspace(-1, 1, 900), np.full(60, 50.0), np.full(40, -9)])
    )
    assert found.beyond == pytest.approx(0.1)
    assert "10.0% of its evaluation values are beyond" in found.text
    assert found.is_shifted


def test_constant_tensors() -> None:
    zeros, ones = np.zeros(100), np.ones(100)
    assert not drift(zeros, zeros).is_shifted
    assert not drift(ones, ones).is_shifted
    assert drift(zeros, ones).is_shifted
    assert drift(ones, zeros).beyond == 1
    with pytest.raises(InvalidData, match="'t' is empty"):
        drift(ones, np.zeros(0))


def test_inputs_and_the_first_layer_of_a_model() -> None:
    model = networks.cnn(8)
    data = [make_dataset({"x": networks.images(40, seed)}, None) for seed in (1, 2)]
    alike = find_drift(model, *data)
    assert [one.tensor for one in alike] == ["x", "conv0"]
    assert shift_warnings(alike) == []
    brighter = make_dataset({"x": data[1].inputs["x"] + 2}, None)
    first, *_ = shift_warnings(find_drift(model, data[0], brighter))
    assert "differ from the evaluation data: tensor 'x'" in first
    assert "PSI" in first


def test_a_model_without_float_inputs_is_judged_by_its_first_layer_or_refused() -> None:
    n = networks.Network()
    n.op("Add", "x", "x", name="y")
    nothing = n.artifact({"x": ["N", 2]}, {"y": ["N", 2]})
    data = make_dataset({"x": np.ones((3, 2), np.float32)}, None)
    assert [one.tensor for one in find_drift(nothing, data, data)] == ["x"]


@pytest.fixture(scope="module")
def model() -> Artifact:
    return networks.mlp()


def samples(count: int, shift: float = 0.0, seed: int = 0) -> Dataset:
    x = np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32) + np.float32(shift)
    return make_dataset({"x": x}, None)


def test_data_unlike_one_another_are_told_with_the_evidence(model: Artifact) -> None:
    assert about(model, samples(200), samples(300, seed=1)) == ()
    first, *_ = about(model, samples(200), samples(300, shift=1.5, seed=1))
    assert "differ from the evaluation data: tensor 'x'" in first
    assert "PSI" in first


def test_no_note_where_nothing_can_be_compared(model: Artifact) -> None:
    nothing = make_dataset({"y": np.zeros((4, 3), np.float32)}, None)
    assert about(model, nothing, nothing) == ()


def test_large_data_are_compared_on_some_samples(model: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def find_drift(_model: Artifact, fitted: Dataset, judged: Dataset) -> list[object]:
        seen.extend([fitted.count, judged.count])
        return []

    monkeypatch.setattr("penstock.offline.compress.ptq.drift.find_drift", find_drift)
    about(model, samples(5000), samples(30), multiple=7)
    assert seen == [511, 28]


def test_what_is_the_same_or_missing_does_not_differ(model: Artifact) -> None:
    same = samples(100)
    assert about(model, same, same) == about(model, None, same) == ()
