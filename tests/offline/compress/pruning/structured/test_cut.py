"""After any cut, the outputs equal those of the whole model with zeros in the weights that read the removed channels."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from networks import Network, attention, cnn, mlp
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument, InvalidModel
from penstock.offline.compress.pruning.structured.cut import Structure
from prunable_networks import Images, encoder, random_cut, without_what_they_lead_to

_HEADS = ["flatten", "reshape", "mean", "pool"]


def _answer(artifact: Artifact, x: np.ndarray) -> np.ndarray:
    loaded = get_engine("onnxruntime").load(artifact, {"threads": 1})
    answer = loaded.forward({"x": x})["y"]
    loaded.unload()
    return answer


def _check(artifact: Artifact, shape: tuple[int, ...], seed: int) -> Structure:
    structure = Structure(artifact)
    kept = random_cut(structure, seed)
    cut = structure.cut(kept)
    onnx.checker.check_model(onnx.load_model_from_string(cut.data), full_check=True)
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    want = _answer(without_what_they_lead_to(structure, kept), x)
    # The same sums with fewer zeros among the terms: FP32 rounding, at the size of the answers.
    np.testing.assert_allclose(_answer(cut, x), want, atol=1e-5 * max(1.0, np.abs(want).max()))
    widths = {group.name: group.units * group.unit_size for group in Structure(cut).groups}
    assert all(widths[name] == len(numbers) * structure.group(name).unit_size for name, numbers in kept.items())
    return structure


@settings(max_examples=40)
@given(
    pieces=st.lists(st.sampled_from(Images.pieces), min_size=1, max_size=6),
    head=st.sampled_from(_HEADS),
    seed=st.integers(0, 99),
)
def test_a_cut_leaves_out_the_channels_and_nothing_else(pieces: list[str], head: str, seed: int) -> None:
    network = Images(seed)
    network.conv()
    for piece in pieces:
        network.add(piece)
    structure = _check(network.classify(head), (2, 3, 8, 8), seed)
    assert any(group.cuttable for group in structure.groups)


@pytest.mark.parametrize("piece", Images.pieces)
def test_every_piece_lets_channels_before_it_be_cut(piece: str) -> None:
    network = Images(1)
    network.conv()
    network.add(piece)
    network.add(piece)
    structure = _check(network.classify("flatten"), (2, 3, 8, 8), 1)
    free = [group.cuttable for group in structure.groups]
    assert free == [True] * (len(free) - 1) + [False]  # all but the output


@example(heads=4, size=1, batch="N", seed=0)
@settings(max_examples=12)
@given(heads=st.integers(2, 5), size=st.integers(1, 4), batch=st.sampled_from([2, "N"]), seed=st.integers(0, 99))
def test_heads_are_cut_as_units(heads: int, size: int, batch: int | str, seed: int) -> None:
    structure = _check(encoder(heads, size, batch), (2, 5, 6), seed)
    attention_heads = structure.groups[1]
    assert (attention_heads.units, attention_heads.unit_size, len(attention_heads.layers)) == (heads, size, 3)
    assert attention_heads.cuttable


def test_normalised_channels_are_cut_only_if_asked_for() -> None:
    exact, rough = Structure(encoder()), Structure(encoder(), exact=False)
    assert "LayerNormalization" in exact.groups[0].reason
    assert rough.groups[0].cuttable
    cut = rough.cut({rough.groups[0].name: range(6)})
    assert _answer(cut, np.ones((3, 5, 6), np.float32)).shape == (3, 5, 6)


def test_the_groups_of_a_residual_network() -> None:
    stem, inner, output = Structure(cnn()).groups
    assert (stem.units, len(stem.layers), stem.frozen) == (32, 2, ())
    assert (inner.units, len(inner.layers), inner.frozen) == (32, 1, ())
    assert (output.units, output.cuttable) == (10, False)
    assert "output of the model" in output.reason


def test_nothing_changes_without_a_cut_and_the_same_cut_gives_the_same_bytes() -> None:
    structure = Structure(cnn())
    assert structure.cut({}) == structure.cut({structure.groups[0].name: range(32)})
    half = {structure.groups[0].name: range(16)}
    assert structure.cut(half) == Structure(cnn()).cut(half)


def test_one_constant_of_two_layers_is_cut_for_each() -> None:
    n = Network()
    shared = n.normal(8)
    x = n.op("Relu", n.op("Add", n.op("MatMul", "x", n.normal(4, 8)), shared))
    x = n.op("Relu", n.op("Add", n.op("MatMul", x, n.normal(8, 8)), shared))
    n.op("MatMul", x, n.normal(8, 3), name="y")
    structure = _check(n.artifact({"x": ["N", 4]}, {"y": ["N", 3]}), (2, 4), 0)
    assert [group.units for group in structure.groups if group.cuttable] == [8, 8]


@pytest.mark.parametrize(
    ("operator", "attributes", "reason"),
    [
        ("Softmax", {"axis": 1}, "Softmax"),
        ("LRN", {"size": 3}, "LRN"),
        ("CumSum", {}, "CumSum"),
        ("DepthToSpace", {"blocksize": 2}, "DepthToSpace"),
    ],
)
def test_what_mixes_channels_or_is_not_understood_keeps_them(operator: str, attributes: dict, reason: str) -> None:
    n = Images(0)
    n.conv()
    n.channels = 8
    n.conv()
    inputs = [n.x, n.weight(np.array(1))] if operator == "CumSum" else [n.x]
    n.x = n.op(operator, *inputs, **attributes)
    n.op("GlobalAveragePool", n.x, name="y")
    structure = Structure(n.artifact({"x": [2, 3, 8, 8]}, {"y": [2, None, 1, 1]}))
    *_, last = structure.groups
    assert not last.cuttable
    assert reason in last.reason
    assert any(reason in line and "0 of" in line for line in structure.explain())


def test_single_head_attention_is_left_whole_where_it_sums() -> None:
    query, key, value = Structure(attention()).groups[:3]
    assert not query.cuttable
    assert not key.cuttable
    assert value.cuttable


def test_a_size_that_is_computed_with_keeps_its_channels() -> None:
    n = Network()
    x = n.op("MatMul", "x", n.normal(4, 8))
    size = n.op("Cast", n.op("Shape", x, start=1, end=3), to=onnx.TensorProto.FLOAT)
    n.op("MatMul", n.op("Div", x, n.op("ReduceMax", size)), n.normal(8, 3), name="y")
    (group, _) = Structure(n.artifact({"x": ["N", "T", 4]}, {"y": ["N", "T", 3]})).groups
    assert not group.cuttable
    assert "number" in group.reason


def test_a_cut_that_makes_no_sense_is_refused() -> None:
    structure = Structure(mlp())
    name = structure.groups[0].name
    for kept in ({"nothing": [0]}, {name: []}, {name: [64]}, {structure.groups[-1].name: [0]}):
        with pytest.raises(InvalidArgument):
            structure.cut(kept)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidModel):
        Structure(Artifact.from_bytes(b"no model"))


@pytest.mark.parametrize("how", ["Pad", "Resize"])
def test_a_layer_that_reads_channels_of_another_number_is_left_alone(how: str) -> None:
    n = Network()
    x = n.op("MatMul", n.op("MatMul", "x", n.normal(3, 5)), n.normal(5, 6))
    if how == "Pad":
        longer = n.op("Pad", x, n.weight(np.array([0, 0, 0, 0, 0, 1])))
    else:
        longer = n.op("Resize", x, "", "", n.weight(np.array([2, 4, 7])), mode="nearest")
    n.op("MatMul", longer, n.normal(7, 2), name="y")
    artifact = n.artifact({"x": [2, 4, 3]}, {"y": [2, 4, 2]})
    structure = _check(artifact, (2, 4, 3), 0)
    assert [len(group.frozen) for group in structure.groups] == [0, 6, 2]


def test_channels_over_which_an_instance_normalisation_runs_stay() -> None:
    n = Network()
    x = n.op("MatMul", "x", n.normal(3, 6))
    n.op("MatMul", n.op("InstanceNormalization", x, n.normal(4), n.normal(4)), n.normal(6, 2), name="y")
    structure = _check(n.artifact({"x": [2, 4, 3]}, {"y": [2, 4, 2]}), (2, 4, 3), 0)
    assert len(structure.groups[0].frozen) == 6
