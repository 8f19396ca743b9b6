"""Padding and truncation of sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.text.sequence import PadSequence, TruncateSequence
from penstock.pipeline.value import TEXT, ValueType
from penstock.tensor import DataType

SIDES = st.sampled_from(["left", "right"])


@given(st.integers(0, 6), st.integers(1, 8), SIDES, st.booleans())
def test_padding_and_its_mask(count: int, length: int, side: Any, is_wide: bool) -> None:
    value = np.arange(1, count + 1, dtype=np.int32)
    value = np.stack([value, value], axis=1) if is_wide else value
    step = PadSequence(length=length, fill=-1, side=side)
    if count > length:
        with pytest.raises(InvalidInput, match=f"has {count} entries, the limit is {length}"):
            step.run({"value": value})
        return
    found = step.run({"value": value})
    assert found["value"].dtype == np.int32
    assert found["value"].shape == (length, *value.shape[1:])
    assert np.array_equal(found["value"][found["mask"] == 1], value)
    assert (found["value"][found["mask"] == 0] == -1).all()
    assert found["mask"].tolist() == sorted(found["mask"], reverse=side == "right")


@given(st.integers(0, 8), st.integers(1, 8), SIDES)
def test_truncation(count: int, length: int, side: Any) -> None:
    found = TruncateSequence(length=length, side=side).run({"value": np.arange(count)})["value"]
    expected = list(range(count))
    assert found.tolist() == (expected[:length] if side == "right" else expected[-length:])


def test_types() -> None:
    assert TruncateSequence(length=4).check({"value": ValueType(shape=(9, 2))})["value"].shape == (4, 2)
    assert TruncateSequence(length=4).check({"value": ValueType(shape=(-1,))})["value"].shape == (-1,)
    assert PadSequence(length=4).check({"value": ValueType(shape=(-1, 2))})["value"].shape == (4, 2)
    with pytest.raises(InvalidConfig, match="an array of at most 4 entries"):
        PadSequence(length=4).check({"value": ValueType(shape=(5,))})
    for step in (PadSequence(length=4), TruncateSequence(length=4)):
        with pytest.raises(InvalidConfig, match="needs an array"):
            step.check({"value": TEXT})


@pytest.mark.parametrize(
    ("fill", "datatype", "fits"),
    [
        *((0, "INT64", True), (0.5, "INT64", False), (-1, "UINT8", False), (255, "UINT8", True), (256, "UINT8", False)),
        *((0.5, "FP16", True), (1e6, "FP16", False), (2, "BOOL", False), (1, "BOOL", True), (0, "BYTES", False)),
    ],
)
def test_the_datatype_holds_the_padding(fill: float, datatype: str, fits: bool) -> None:
    """Otherwise, numpy would write another number."""
    step, kind = PadSequence(length=4, fill=fill), ValueType(datatype=DataType(datatype), shape=(-1,))
    if fits:
        assert step.check({"value": kind})["value"].shape == (4,)
        padded = step.run({"value": np.zeros(1, kind.datatype.dtype)})["value"]
        assert padded[1:].tolist() == [fill] * 3
        return
    with pytest.raises(InvalidConfig, match=f"which is no {datatype}|needs an array of numbers"):
        step.check({"value": kind})
