"""Curves of layers, and sparsities chosen from them, compared with scikit-learn and a linear program."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from sklearn.isotonic import IsotonicRegression

from networks import Network, mlp
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidConfig
from penstock.offline.compress.pruning.layer_sparsity import (
    LayerCurve,
    LayerSensitivity,
    allocate,
    hull,
    isotonic,
    measure_layers,
)
from penstock.offline.compress.pruning.magnitude import PruneOptions, prune
from penstock.offline.judge.accuracy import answers
from penstock.offline.sessions import loaded

_values = st.lists(st.floats(-1, 1), min_size=1, max_size=12)
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


def _data(labels: bool = False) -> Dataset:
    data = make_dataset({"x": np.random.default_rng(0).normal(size=(60, 16)).astype(np.float32)}, None)
    if not labels:
        return data
    with loaded(mlp()) as model:
        return make_dataset(data.inputs, answers(model, data)["y"] + np.float32(0.01))


def _curve(name: str, size: int, losses: list[float]) -> LayerCurve:
    zeros = tuple(0.0 for _ in losses)
    return LayerCurve(name, size, GRID, zeros, tuple(losses))


@given(_values)
def test_the_monotone_fit_is_that_of_least_squares(values: list[float]) -> None:
    wanted = IsotonicRegression().fit_transform(np.arange(len(values)), values)
    assert isotonic(np.array(values)) == pytest.approx(wanted, abs=1e-9)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=10))
def test_the_hull_lies_below_and_is_convex(values: list[float]) -> None:
    x, y = np.arange(len(values), dtype=float), np.array(values)
    corners = hull(x, y)
    assert corners[0] == 0
    assert corners[-1] == len(values) - 1
    assert (np.interp(x, x[corners], y[corners]) <= y + 1e-9).all()
    assert (np.diff(np.diff(y[corners]) / np.diff(x[corners])) >= -1e-9).all()


_losses = st.lists(st.floats(0, 1), min_size=4, max_size=4).map(lambda values: [0.0, *np.cumsum(values)])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), _losses), min_size=1, max_size=4), st.floats(0.01, 1))
def test_the_allocation_against_a_linear_program(layers: list[tuple[int, list[float]]], goal: float) -> None:
    """A mixture of a layer's measured points corresponds to a point on its convex hull."""
    curves = [_curve(f"w{n}", size, losses) for n, (size, losses) in enumerate(layers)]
    found = allocate(curves, goal)
    costs = np.concatenate([curve.fitted() for curve in curves])
    sizes = np.concatenate([curve.size * np.array(GRID) for curve in curves])
    one_each = np.kron(np.eye(len(curves)), np.ones(len(GRID)))
    total = sum(curve.size for curve in curves)
    program = linprog(costs, A_ub=[-sizes], b_ub=[-goal * total], A_eq=one_each, b_eq=np.ones(len(curves)))
    assert found.predicted == pytest.approx(program.fun, abs=1e-6)
    reached = sum(found.sparsities[curve.weight] * curve.size for curve in curves) / total
    assert reached == pytest.approx(found.sparsity)
    assert found.sparsity == pytest.approx(goal, abs=1e-6)


def test_a_layer_that_loses_much_keeps_more() -> None:
    easy, hard = _curve("easy", 100, [0, 0, 0.01, 0.02, 0.9]), _curve("hard", 100, [0, 0.2, 0.5, 0.8, 0.9])
    found = allocate([hard, easy], 0.3)
    assert found.sparsities["easy"] == pytest.approx(0.6)
    assert found.sparsities["hard"] == 0


def test_no_further_than_was_measured() -> None:
    curve = LayerCurve("w", 10, (0.0, 0.5), (1.0, 0.9), (0.0, 0.1))
    with pytest.raises(InvalidConfig, match="beyond the measured maximum, 0.5"):
        allocate([curve], 0.6)


@pytest.mark.parametrize("labels", [False, True])
def test_curves_of_a_model(labels: bool) -> None:
    calls: list[tuple[int, int]] = []
    found = measure_layers(
        mlp(), _data(labels), grid=(0.5, 0.9), on_progress=lambda done, total: calls.append((done, total))
    )
    assert found.metric == ("r2" if labels else "fidelity")
    assert [curve.weight for curve in found.curves] == ["w0", "w2", "w4"]
    assert [curve.size for curve in found.curves] == [16 * 64, 64 * 64, 64 * 4]
    for curve in found.curves:
        assert curve.sparsities == (0.0, 0.5, 0.9)
        assert curve.divergences[0] == 0
        assert 0 < curve.divergences[1] < curve.divergences[2]
        assert curve.accuracies[0] == found.accuracy
    assert calls[0] == (0, 6)
    assert calls[-1] == (6, 6)
    assert msgspec.json.decode(msgspec.json.encode(found), type=LayerSensitivity) == found
    assert all(curve.weight in found.chart() for curve in found.curves)
    chosen = allocate(found.curves, 0.8)
    pruned = prune(mlp(), PruneOptions(chosen.rule))
    assert pruned.provenance[-1].facts["sparsity"] == pytest.approx(0.8, abs=2e-3)


def test_a_curve_of_values() -> None:
    """Without class scores, the metric is fidelity."""
    n = Network()
    n.op("Tanh", n.gemm("x", 16, 3), name="y")
    found = measure_layers(n.artifact({"x": ["N", 16]}, {"y": ["N", 3]}), _data(), grid=(0.5,))
    assert 0 < found.curves[0].divergences[1] < 1


@pytest.mark.parametrize("grid", [(), (0.0,), (-0.1, 0.5), (0.5, 1.2)])
def test_grids_that_make_no_sense(grid: tuple[float, ...]) -> None:
    with pytest.raises(InvalidConfig, match="between 0 and 1"):
        measure_layers(mlp(), _data(), grid=grid)
