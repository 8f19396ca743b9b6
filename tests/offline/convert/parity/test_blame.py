"""Blame names the guilty node, also if links are wrong, sparse or missing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from benchmarks.fault_graphs import GRAPHS, make
from benchmarks.faults import FAULTS, inject
from penstock.offline.convert.base import TensorLink
from penstock.offline.convert.parity.blame import of_failure, of_output
from penstock.offline.convert.parity.compare import OutputDifference
from penstock.offline.convert.parity.nodes import Nodes
from tests.compared import checked

MODEL = onnx.parser.parse_model(
    """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x, float[M] v) => (float[K] y, float[N] x2)
    { [first] a = Mul(x, x) [second] y = Add(a, v) [third] x2 = Neg(x) }"""
)
X = np.ones(2, np.float32)


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_finds_the_fault_and_names_its_node(fault: str) -> None:
    for name in GRAPHS:
        model = make(name, 1)
        injected = inject(model, fault, np.random.default_rng(1))
        if injected is not None:
            break
    else:
        pytest.skip("no graph has the operator")
    found = checked(model, injected.model)
    assert not found.holds
    assert found.first_divergent is not None
    assert any(label in found.first_divergent.node for label in injected.guilty), found.first_divergent


def test_without_links_names_the_output() -> None:
    model = make("resnet")
    injected = inject(model, "lost bias", np.random.default_rng(0))
    assert injected is not None
    found = checked(model, injected.model, ())
    assert not found.holds
    assert any("no intermediate values" in note or "no single node" in note for note in found.notes)


def test_a_wrong_link_blames_no_innocent_node() -> None:
    """A link names the tensor after an activation by the layer before it."""
    model = make("resnet")
    injected = inject(model, "max for average", np.random.default_rng(0))
    assert injected is not None
    links = [TensorLink(name, name) for node in model.graph.node for name in node.output]
    links = [TensorLink("n1", "r1") if link.tensor == "n1" else link for link in links]
    found = checked(model, injected.model, tuple(links))
    assert found.first_divergent is not None
    assert any(label in found.first_divergent.node for label in injected.guilty), found.first_divergent


def test_an_output_names_the_node_that_computes_it() -> None:
    found = of_output(Nodes(MODEL), "y", X, X + 1, OutputDifference(0.5))
    assert found.node == "second (Add)"
    assert found.error == 0.5
    assert found.expected.startswith("float32[2] from 1 to 1")
    assert found.found.startswith("float32[2] from 2 to 2")


def test_a_failure_names_the_node_that_fails() -> None:
    links = [TensorLink("y", "sum", "model.py:3")]
    found = of_failure(Nodes(MODEL), links, {"x": X, "v": np.ones(3, np.float32)}, "it fails")
    assert found.node == "second (Add)"
