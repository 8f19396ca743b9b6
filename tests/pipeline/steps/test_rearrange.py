"""Reordering of axes against numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.rearrange import Rearrange
from penstock.pipeline.value import FILE, Media, ValueType
from penstock.tensor import DataType


@given(st.permutations("abcd"), st.integers(1, 4), st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4)))
def test_axes_move_as_in_numpy(order: list[str], rank: int, added: set[int], dropped: set[int]) -> None:
    names = list("abcd"[:rank])
    order = [name for name in order if name in names]
    array = np.random.default_rng(rank).random([2, 3, 4, 5][:rank])
    expected = array.transpose([names.index(name) for name in order])
    before, after = list(names), list(order)
    for position in sorted(dropped):
        if position <= rank:
            array, _ = np.expand_dims(array, position), before.insert(position, "1")
    for position in sorted(added):
        if position <= rank:
            expected, _ = np.expand_dims(expected, position), after.insert(position, "1")
    step = Rearrange(pattern=f"{' '.join(before)} -> {' '.join(after)}")
    found = step.run({"value": array})["value"]
    np.testing.assert_array_equal(found, expected)
    assert found.flags.c_contiguous
    assert step.check({"value": ValueType(datatype=DataType.FP64, shape=array.shape)})["value"].shape == expected.shape


def test_types() -> None:
    step = Rearrange(pattern="h w c -> c h w")
    picture = ValueType(Media.IMAGE, DataType.UINT8, (-1, 20, 3), colour="rgb")
    assert step.check({"value": picture})["value"] == ValueType(Media.TENSOR, DataType.UINT8, (3, -1, 20), colour="rgb")
    for wrong in (FILE, ValueType(shape=(3,)), ValueType(shape=(3, 3, 3), many=True)):
        with pytest.raises(InvalidConfig, match="step 'rearrange' needs an array"):
            step.check({"value": wrong})
    with pytest.raises(InvalidConfig, match="axes 1, t"):
        Rearrange(pattern="1 t -> t").check({"value": ValueType(shape=(2, 5))})
    with pytest.raises(InvalidInput, match=r"the shape \[2, 5\], not \[1, t\]"):
        Rearrange(pattern="1 t -> t").run({"value": np.zeros((2, 5))})


@pytest.mark.parametrize("pattern", ["", "a b", "a a -> a", "a 2 -> 2 a", "(a b) -> a b", "a -> b a", "a b -> a"])
def test_patterns_that_cannot_be_read(pattern: str) -> None:
    with pytest.raises(InvalidConfig, match="step 'rearrange' .*write e.g. 'mels frames -> 1 frames mels'"):
        Rearrange(pattern=pattern)


def test_every_order_has_its_inverse() -> None:
    array = np.arange(24).reshape(2, 3, 4)
    for order in itertools.permutations("abc"):
        there, back = f"a b c -> {' '.join(order)}", f"{' '.join(order)} -> a b c"
        moved = Rearrange(pattern=there).run({"value": array})
        np.testing.assert_array_equal(Rearrange(pattern=back).run(moved)["value"], array)
