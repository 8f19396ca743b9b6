"""Operators that move axes and positions: the channels that can be cut, their units, and the rewritten constants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from networks import Network
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.offline.compress.pruning.structured.coupling import ChannelGroup
from penstock.offline.compress.pruning.structured.cut import Structure
from prunable_networks import without_what_they_lead_to

Build = Callable[[Network, str], tuple[str, int]]


def structure(build: Build) -> Structure:
    """x (2, 3), a layer of 12 channels called ``first``, ``build``, which returns a tensor and its width, and a layer of 5
    channels."""
    n = Network()
    middle, width = build(n, n.op("MatMul", "x", n.normal(3, 12), name="first"))
    n.op("MatMul", middle, n.normal(width, 5), name="y")
    return Structure(n.artifact({"x": [2, 3]}, {"y": [2, 5]}))


def ints(n: Network, *numbers: int) -> str:
    return n.weight(np.array(numbers, np.int64))


def split(n: Network, x: str) -> tuple[str, int]:
    n.nodes.append(onnx.helper.make_node("Split", [x, ints(n, 4, 8)], ["a", "b"], axis=1))
    return n.op("Concat", "b", n.op("Relu", "a"), axis=1), 12


def mirrored(n: Network, x: str) -> tuple[str, int]:
    heads = n.op("Reshape", x, ints(n, 2, 4, 3))
    return n.op(
        "Reshape", n.op("Transpose", n.op("Transpose", heads, perm=[1, 0, 2]), perm=[1, 0, 2]), ints(n, 2, 12)
    ), 12


FREE: dict[str, tuple[Build, int, int]] = {
    "flatten": (lambda n, x: (n.op("Flatten", x), 12), 12, 1),
    "unsqueeze and squeeze": (lambda n, x: (n.op("Squeeze", n.op("Unsqueeze", x, ints(n, 0)), ints(n, 0)), 12), 12, 1),
    "transpose twice": (lambda n, x: (n.op("Transpose", n.op("Transpose", x)), 12), 12, 1),
    "heads and back": (mirrored, 4, 3),
    "copied and inferred sizes": (
        lambda n, x: (n.op("Reshape", n.op("Reshape", x, ints(n, 0, 4, -1)), ints(n, 0, -1)), 12),
        4,
        3,
    ),
    "rows strung together and apart": (
        lambda n, x: (n.op("Reshape", n.op("Reshape", x, ints(n, 24)), ints(n, 2, 12)), 12),
        12,
        1,
    ),
    "split": (split, 12, 1),
    "slice": (lambda n, x: (n.op("Slice", x, ints(n, 2), ints(n, 10), ints(n, 1)), 8), 12, 1),
    "slice from behind": (lambda n, x: (n.op("Slice", x, ints(n, -8), ints(n, 99), ints(n, 1)), 8), 12, 1),
    "gather": (lambda n, x: (n.op("Gather", x, ints(n, *range(11, -1, -1)), axis=1), 12), 12, 1),
    "gather twice the same": (lambda n, x: (n.op("Gather", x, ints(n, 0, 0, 5), axis=1), 3), 12, 1),
    "concat with itself": (lambda n, x: (n.op("Concat", x, n.op("Relu", x), axis=1), 24), 12, 1),
}


@pytest.mark.parametrize("name", FREE)
def test_units_are_found_and_half_of_them_cut(name: str) -> None:
    build, units, size = FREE[name]
    found = structure(build)
    first = found.group("first")
    assert (first.units, first.unit_size) == (units, size)
    assert len(first.frozen) <= 1 + (name == "split")  # no part may become empty
    kept = {"first": sorted({*first.frozen, *range(0, units, 2)})}
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    want, got = (
        get_engine("onnxruntime").load(artifact, {"threads": 1}).forward({"x": x})["y"]
        for artifact in (without_what_they_lead_to(found, kept), found.cut(kept))
    )
    np.testing.assert_allclose(got, want, atol=1e-4)


def stuck(build: Build) -> ChannelGroup:
    return structure(build).group("first")


FROZEN: dict[str, tuple[Build, str]] = {
    "slice in steps": (
        lambda n, x: (n.op("Slice", x, ints(n, 0), ints(n, 12), ints(n, 1), ints(n, 2)), 6),
        "has a step other than 1",
    ),
    "a sum over products": (
        lambda n, x: (n.op("MatMul", x, n.op("MatMul", n.op("Transpose", x), x)), 12),
        "sums over them",
    ),
    "gather of one position": (
        lambda n, x: (n.op("Unsqueeze", n.op("Gather", x, n.weight(np.array(3)), axis=1), ints(n, 1)), 1),
        "with indices that are not a vector",
    ),
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_not_understood_stays_with_its_reason(name: str) -> None:
    build, reason = FROZEN[name]
    group = stuck(build)
    assert not group.cuttable
    assert reason in group.reason


def test_channels_beside_fixed_ones_can_still_be_cut() -> None:
    group = stuck(lambda n, x: (n.op("Concat", x, n.op("Relu", "x"), axis=1), 15))
    assert (group.units, group.frozen) == (12, ())


def test_an_embedding_is_a_layer_of_its_own() -> None:
    n = Network()
    rows = n.op("Cast", "x", to=onnx.TensorProto.INT64)
    embedded = n.op("Gather", n.normal(9, 6), rows, name="first")
    n.op("MatMul", embedded, n.normal(6, 5), name="y")
    first, _ = Structure(n.artifact({"x": [2, 3]}, {"y": [2, 3, 5]})).groups
    assert (first.name, first.units, first.cuttable) == ("first", 6, True)


def test_the_shape_of_a_tensor_of_unknown_rank_freezes_nothing() -> None:
    body = """<ir_version: 8, opset_import: ["": 17]> g (float[2,3] x) => (float[1] y)
        <int64 turns = {2}, bool always = {1}, int64[1] second = {1}> {
        state, all = Loop(turns, always, x) <body = b (int64 i, bool go, float[] s) => (bool on, float[] t, float[] u) {
            on = Identity(go)
            t = Transpose(s)
            u = Tanh(t)
        }>
        shape = Shape(all)
        size = Gather(shape, second)
        y = Cast<to = 1>(size)
    }"""
    assert Structure(Artifact.from_bytes(onnx.parser.parse_model(body).SerializeToString())).groups == ()


def test_channels_that_are_positions_in_a_table_are_not_cut() -> None:
    n = Network()
    scores = n.op("MatMul", "x", n.normal(3, 4))
    places = n.op("Clip", n.op("Cast", scores, to=7), n.weight(np.array(0)), n.weight(np.array(2)))
    n.op("Gather", n.normal(3, 2), places, name="y")
    (group, *_) = Structure(n.artifact({"x": [2, 3]}, {"y": [2, 4, 2]})).groups
    assert len(group.frozen) == 4
    assert "uses their values as indices" in group.reason
