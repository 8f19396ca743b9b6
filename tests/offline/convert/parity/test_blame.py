"""Blame names the guilty node, also if links are wrong, sparse or missing."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fault_graphs import GRAPHS, make
from benchmarks.faults import FAULTS, inject
from penstock.offline.convert.base import TensorLink
from tests.compared import checked


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
