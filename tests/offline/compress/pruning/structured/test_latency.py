"""The table derives the shapes after a cut, and measures each layer once."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from networks import cnn, images
from penstock.artifact import Artifact
from penstock.offline.compress.pruning.structured import latency
from penstock.offline.compress.pruning.structured.cut import Structure
from penstock.offline.compress.pruning.structured.latency import LatencyTable, TimedLayer
from prunable_networks import Images, encoder, random_cut


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests do not depend on the precision of measurements."""
    monkeypatch.setattr(latency, "_SECONDS", 0.001)


def _network(name: str) -> tuple[Artifact, np.ndarray]:
    rng = np.random.default_rng(0)
    if name == "encoder":
        return encoder(), rng.standard_normal((1, 5, 6)).astype(np.float32)
    network = Images(3)
    network.conv()
    network.add(name)
    return network.classify("flatten"), rng.standard_normal((2, 3, 8, 8)).astype(np.float32)


@pytest.mark.parametrize("name", ["conv", "depthwise", "grouped", "concat", "split", "transposed", "encoder"])
def test_layers_of_a_plan_are_those_of_the_cut_model(name: str) -> None:
    artifact, x = _network(name)
    structure = Structure(artifact)
    kept = random_cut(structure, 1)
    predicted: dict[TimedLayer, float] = {}
    LatencyTable(structure, {"x": x}, 1, predicted).totals([kept])
    cut = Structure(structure.cut(kept))
    real: dict[TimedLayer, float] = {}
    LatencyTable(cut, {"x": x}, 1, real).totals([{}])
    assert predicted.keys() == real.keys()
    assert all(ms > 0 for ms in predicted.values())


def test_a_layer_is_measured_once_and_known_to_the_next_table() -> None:
    structure, known = Structure(cnn()), {}
    table = LatencyTable(structure, {"x": images(1)}, 1, known)
    name = structure.groups[0].name
    first = table.totals([{}, {name: range(16)}])
    assert LatencyTable(structure, {"x": images(1)}, 1, known).totals([{}, {name: range(16)}]) == first
    operators = [onnx.NodeProto.FromString(layer.node).op_type for layer in known]
    assert sorted(operators) == ["Conv"] * 5 + ["Gemm"] * 2  # the last two convolutions differ in input or output
