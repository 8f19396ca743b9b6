"""``narrow``: the result loads, keeps its interface and reports the cut; invalid options are rejected."""

from __future__ import annotations

import numpy as np
import pytest

from networks import Network, attention, cnn, images, mlp
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidConfig, InvalidData, Unsupported
from penstock.offline.compress.pruning.structured import search as structured
from penstock.offline.compress.pruning.structured.cut import Structure
from penstock.offline.compress.pruning.structured.search import NarrowOptions, narrow
from prunable_networks import encoder


def _signature(artifact: Artifact) -> object:
    loaded = get_engine("onnxruntime").load(artifact, {"threads": 1})
    signature = loaded.signature
    loaded.unload()
    return signature


@pytest.mark.parametrize("make", [cnn, mlp, encoder, attention])
def test_the_interface_stays_and_parameters_go(make: type) -> None:
    original = make()
    narrowed = narrow(original, NarrowOptions(width=0.5, block=4))
    assert _signature(narrowed) == _signature(original)
    (step,) = narrowed.provenance
    before, after = step.facts["parameters"]
    assert after < before
    assert narrowed.size_bytes < original.size_bytes
    assert all(0 < left < units for units, left in step.facts["groups"].values())


def test_the_same_arguments_give_the_same_bytes() -> None:
    data = make_dataset({"x": images(9)}, None)
    for importance in ("norm", "batch-norm", "activation"):
        options = NarrowOptions(importance=importance)
        assert narrow(cnn(), options, data).data == narrow(cnn(), options, data).data


def test_heads_can_be_left_whole() -> None:
    groups = narrow(encoder(), NarrowOptions(width=0.5, heads=False)).provenance[0].facts["groups"]
    assert list(groups.values()) == [[16, 8]]


def test_a_fixed_batch_is_kept() -> None:
    narrowed = narrow(cnn(batch=3), NarrowOptions(width=0.5))
    loaded = get_engine("onnxruntime").load(narrowed, {"threads": 1})
    assert loaded.forward({"x": images(3)})["y"].shape == (3, 10)


def test_a_speedup_out_of_reach_is_refused_with_what_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "_MEASURE_S", 0.05)
    with pytest.raises(Unsupported, match="times faster, not 1e\\+06"):
        narrow(mlp(), NarrowOptions(width=1, speedup=1e6))


@pytest.mark.parametrize("change", [{"width": 0}, {"width": 1.1}, {"speedup": 1.0}, {"block": 0}, {"threads": 0}])
def test_options_that_make_no_sense_are_refused(change: dict) -> None:
    with pytest.raises(InvalidConfig):
        narrow(mlp(), NarrowOptions(**change))


def test_activation_wants_data() -> None:
    with pytest.raises(InvalidData, match="needs data"):
        narrow(mlp(), NarrowOptions(importance="activation"))


def test_a_model_of_which_nothing_can_be_cut_says_why() -> None:
    n = Network()
    n.gemm("x", 4, 3, name="y")
    with pytest.raises(Unsupported, match="output of the model"):
        narrow(n.artifact({"x": ["N", 4]}, {"y": ["N", 3]}))
    n = Network()
    n.op("Relu", "x", name="y")
    with pytest.raises(Unsupported, match="no layers"):
        narrow(n.artifact({"x": ["N", 4]}, {"y": ["N", 4]}))


def test_scores_of_ones_own_decide() -> None:
    original = mlp()
    structure = Structure(original)
    scores = {group.name: np.arange(group.units, dtype=float) for group in structure.groups}
    names = [group.name for group in structure.groups if group.cuttable]
    want = structure.cut({name: range(32, 64) for name in names})
    assert narrow(original, NarrowOptions(width=0.5), scores=scores).data == want.data
