"""Atoms, units and groups, without a model: joined atoms are cut together, frozen atoms stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.offline.compress.pruning.structured.coupling import ChannelSlot, Coupling, describe


def value(name: str, *shape: int) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))


def layer(name: str) -> ir.Node:
    node = ir.Node("", "MatMul", [value("x", 2, 4), value(f"w_{name}", 4, 4)])
    node.outputs[0].name = name
    return node


def test_fresh_positions_are_units_of_their_own() -> None:
    coupling = Coupling(18)
    first, second = coupling.fresh(3), coupling.fresh(2)
    assert len({*coupling.roots(first), *coupling.roots(second)}) == 5


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=15), st.booleans())
def test_joining_is_an_equivalence(pairs: list[tuple[int, int]], settled: bool) -> None:
    coupling = Coupling(18)
    labels = coupling.fresh(10)
    classes = {number: {number} for number in range(10)}
    for one, other in pairs:
        coupling.join(labels[[one]], labels[[other]])
        merged = classes[one] | classes[other]
        classes |= dict.fromkeys(merged, merged)
    if settled:
        coupling.freeze_units()
    roots = coupling.roots(labels)
    assert all((roots[one] == roots[other]) == (other in classes[one]) for one in range(10) for other in range(10))


def test_one_position_joins_a_whole_axis() -> None:
    coupling = Coupling(18)
    labels = coupling.fresh(4)
    coupling.join(labels, coupling.fresh(1))
    assert len(set(coupling.roots(labels))) == 1


def test_reasons_follow_units_and_the_first_stays() -> None:
    coupling = Coupling(18)
    first, second = coupling.fresh(2), coupling.fresh(2)
    coupling.freeze(second[:1], "it is an output")
    coupling.join(first, second)
    coupling.freeze(first[:1], "a later reason")
    coupling.freeze(None, "nothing is frozen")
    roots = coupling.roots(first)
    assert [coupling.reason(int(root)) for root in roots] == ["it is an output", ""]


def test_blurred_units_are_frozen_only_if_asked_for() -> None:
    coupling = Coupling(18)
    labels = coupling.fresh(1)
    coupling.blur(labels, "a mean runs over it")
    assert coupling.reason(int(labels[0])) == ""
    coupling.freeze_blurred()
    assert coupling.reason(int(labels[0])) == "a mean runs over it"


def test_fixed_positions_are_one_unit_that_stays() -> None:
    coupling = Coupling(18)
    labels = coupling.fixed(3, "it is a constant")
    assert len(set(coupling.roots(labels))) == 1
    assert coupling.reason(int(labels[0])) == "it is a constant"


def test_layers_that_share_a_unit_are_one_group() -> None:
    coupling = Coupling(18)
    one, other, alone = layer("one"), layer("other"), layer("alone")
    labels = {node: coupling.fresh(4) for node in (one, other, alone)}
    for node in (one, other, alone):
        coupling.slots.append(ChannelSlot(node, 1, 1, labels[node], "makes"))
        coupling.slots.append(ChannelSlot(node, 1, 0, coupling.fresh(4), "reads"))
    coupling.join(labels[one], labels[other])
    coupling.join(labels[alone][:1], labels[alone][1:2])
    coupling.freeze(labels[other][2:3], "it is an output")
    residual, single = coupling.groups()
    assert (residual.name, residual.layers, residual.units, residual.unit_size) == ("one", ("one", "other"), 4, 1)
    assert (residual.frozen, residual.reason, residual.cuttable) == ((2,), "it is an output", True)
    assert (single.layers, single.units, single.unit_size) == (("alone",), 3, 2)


def test_a_group_of_one_unit_or_of_frozen_ones_cannot_be_cut() -> None:
    coupling = Coupling(18)
    for name, length in (("one", 1), ("frozen", 2)):
        labels = coupling.fresh(length)
        coupling.slots.append(ChannelSlot(layer(name), 1, 1, labels, "makes"))
        if name == "frozen":
            coupling.freeze(labels, "all of it")
    assert [group.cuttable for group in coupling.groups()] == [False, False]


def test_axes_of_values_are_unknown_until_they_are_written() -> None:
    coupling = Coupling(18)
    x = value("x", 2, 3)
    assert coupling.read(None) == []
    assert coupling.read(x) == [None, None]
    labels = coupling.fresh(3)
    coupling.axes[x] = [None, labels]
    assert coupling.read(x) == [None, labels]
    assert describe(layer("y")) == "MatMul 'y'"


def test_the_slot_names_its_constant() -> None:
    coupling, node = Coupling(18), layer("y")
    coupling.slots.append(ChannelSlot(node, 1, 0, coupling.fresh(4)))
    assert (coupling.slots[0].value.name, coupling.slots[0].role) == ("w_y", "goes along")
    with pytest.raises(ValueError, match="shape mismatch"):
        coupling.join(coupling.fresh(2), coupling.fresh(3))
    assert np.array_equal(coupling.roots(coupling.fresh(0)), [])
