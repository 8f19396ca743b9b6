"""Cuts of a model: head and tail together compute what the model computes."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from benchmarks.models import encoder
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument
from penstock.offline.sessions import loaded
from penstock.offline.split import NetworkLink, cut_tensors, parts, split


def _random_graph(joins: list[tuple[int, int]]) -> onnx.ModelProto:
    """A graph of additions: node ``i`` adds two earlier tensors, numbered from the input; the last one is the output."""
    names = ["x", *(f"t{number}" for number in range(len(joins)))]
    nodes = [
        helper.make_node("Add", [names[one % (at + 1)], names[two % (at + 1)]], [names[at + 1]])
        for at, (one, two) in enumerate(joins)
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, ["n", 4])], [value(names[-1], TensorProto.FLOAT, ["n", 4])]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=10))
def test_every_cut_of_a_random_graph_gives_the_same_outputs(joins: list[tuple[int, int]]) -> None:
    model = _random_graph(joins)
    artifact = Artifact.from_bytes(model.SerializeToString())
    inputs = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}
    with loaded(artifact) as whole:
        expected = whole.forward(inputs)
    for tensor in cut_tensors(model.graph):
        head, tail = parts(artifact, tensor)
        with loaded(head) as one, loaded(tail) as two:
            assert list(one.signature.output_names) == [tensor]
            found = two.forward(one.forward(inputs))
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)


def test_a_shortcut_leaves_no_cut_within_its_block() -> None:
    model = _random_graph([(0, 0), (1, 1), (2, 1), (3, 3)])  # t2 = t1 + t0: t1 alone does not carry everything
    assert cut_tensors(model.graph) == ["t0", "t2"]


@pytest.mark.parametrize(
    ("link", "side"),
    [(NetworkLink(1e6, 0.0, 100.0), "server"), (NetworkLink(1e-3, 1000.0, 1.0), "device")],
)
def test_extreme_links_use_one_side(link: NetworkLink, side: str, tmp_path: Path) -> None:
    found = split(Artifact.from_file(encoder(tmp_path / "encoder.onnx")), link)
    assert found.head is None
    assert bool(found.best.device_ms) == (side == "device")
    assert found.best.total_ms == min(one.total_ms for one in found.cuts)


def test_an_unknown_cut_is_an_error_that_lists_cuts() -> None:
    with pytest.raises(InvalidArgument, match="t9") as error:
        parts(Artifact.from_bytes(_random_graph([(0, 0), (1, 1)]).SerializeToString()), "t9")
    assert "t0" in error.value.hint
