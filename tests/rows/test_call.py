import itertools

import numpy as np
import pytest

from penstock.rows.call import RULES, Call, after_first, keeps_shape
from penstock.rows.facts import Dependent, Fact
from penstock.rows.graph import OnnxNode
from penstock.rows.sizes import BATCH, symbol

ROWS, CONSTANT, COUNT = Fact([BATCH, 3]), Fact([3]), Fact.of([BATCH])


def call(*inputs: Fact | None, **attributes: object) -> Call:
    names = tuple("abc"[: len(inputs)])
    return Call(
        OnnxNode("n", "", "Op", "", names, ("y",), attributes), 17, inputs, map(symbol, map(str, itertools.count()))
    )


def test_rows_must_come_out_again() -> None:
    call(ROWS, CONSTANT).check([ROWS])
    call(CONSTANT).check([CONSTANT, None])
    with pytest.raises(Dependent, match="mixes the rows"):
        call(ROWS).check([ROWS, CONSTANT])
    with pytest.raises(Dependent, match="from a constant"):
        call(CONSTANT).check([ROWS])


def test_the_batch_size_must_be_followed() -> None:
    call(COUNT).check([COUNT])
    with pytest.raises(Dependent, match="computes with the batch size"):
        call(COUNT).check([Fact([1])])
    followed = call(CONSTANT, COUNT)
    assert followed.sizes(1) == [BATCH]
    followed.check([CONSTANT])
    with pytest.raises(Dependent, match="depends on the batch size"):
        call(COUNT).numbers(0)


def test_attributes_of_older_versions_are_inputs_of_newer_ones() -> None:
    assert call(ROWS, axes=(1, 2)).integers("axes", 1) == [1, 2]
    assert call(ROWS, Fact.of(np.array([1]))).integers("axes", 1) == [1]
    assert call(ROWS).integers("axes", 1) is None
    for unknown in (CONSTANT, Fact.of([symbol("t")])):
        with pytest.raises(Dependent, match="'b' that is not known before the request"):
            call(ROWS, unknown).integers("axes", 1)


def test_what_rules_ask_of_their_inputs() -> None:
    with pytest.raises(Dependent, match="mixes the rows"):
        call(ROWS).mixes(ROWS, -2)
    call(ROWS).mixes(ROWS, -1)
    with pytest.raises(Dependent, match="has an input 'b' that depends on the rows"):
        call(CONSTANT, ROWS).constants(1, 2)
    with pytest.raises(Dependent, match="more than one element in its input 'a'"):
        call(CONSTANT).singles(0)
    with pytest.raises(Dependent, match="lacks input 1"):
        call(CONSTANT)[1]
    with pytest.raises(Dependent, match="has axis 2, but 2 axes"):
        call(ROWS, axis=2).axis(2, 0)


def test_operators_that_keep_the_shape() -> None:
    keeps_shape("Kept", mixed=after_first, constants=(1,), singles=(2,), domain="test")
    rule = RULES.pop(("test", "Kept"))
    found = rule(call(ROWS, CONSTANT))
    assert isinstance(found, Fact)
    assert found.shape == ROWS.shape
    for inputs, reason in (
        ((Fact([3, BATCH]),), "mixes the rows"),
        ((ROWS, ROWS), "has an input 'b' that depends on the rows"),
        ((ROWS, None, CONSTANT), "more than one element in its input 'c'"),
    ):
        with pytest.raises(Dependent, match=reason):
            rule(call(*inputs))
