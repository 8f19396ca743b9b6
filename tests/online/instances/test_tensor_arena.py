from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpys

from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.instances.tensor_arena import TensorArena, TensorSlot
from penstock.tensor import Array, DataType

FIXED = [datatype.dtype for datatype in DataType if datatype is not DataType.BYTES]
SHAPES = numpys.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


def filled(dtype: np.dtype, shape: tuple[int, ...]) -> Array:
    return (np.arange(int(np.prod(shape))) % 251).reshape(shape).astype(dtype)


TEXTS = st.lists(st.binary(max_size=50), max_size=5).map(lambda elements: np.array([*elements, None], object)[:-1])
TENSORS = st.dictionaries(
    st.text(max_size=5), st.one_of(TEXTS, st.builds(filled, st.sampled_from(FIXED), SHAPES)), max_size=5
)


@pytest.fixture
def sides() -> Iterator[tuple[TensorArena, TensorArena]]:
    writer = TensorArena.create(max_bytes=1 << 24)
    reader = TensorArena(os.dup(writer.file))
    yield writer, reader
    writer.close()
    reader.close()
    assert "penstock-tensors" not in Path("/proc/self/maps").read_text()


def same(got: dict[str, Array], want: dict[str, Array]) -> None:
    assert list(got) == list(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        np.testing.assert_array_equal(got[name], array)


@given(calls=st.lists(TENSORS, max_size=3))
def test_what_one_side_writes_the_other_reads(calls: list[dict[str, Array]]) -> None:
    writer = TensorArena.create()
    reader = TensorArena(os.dup(writer.file))
    try:
        for tensors in calls:
            slots = writer.write(tensors)
            same(reader.copy(slots), tensors)
            ends = [0, *(slot.offset + slot.byte_size for slot in slots)]
            assert all(slot.offset >= end for slot, end in zip(slots, ends, strict=False)), "none overlaps another"
    finally:
        writer.close()
        reader.close()


def test_it_grows_by_doubling_up_to_its_limit(sides: tuple[TensorArena, TensorArena]) -> None:
    writer, reader = sides
    for size, held in ((10, 1 << 16), (100_000, 1 << 17), (20, 1 << 17), (1 << 24, 1 << 24)):
        tensor = {"x": np.full(size, 7, np.uint8)}
        same(reader.copy(writer.write(tensor)), tensor)
        assert os.fstat(writer.file).st_size == held
    with pytest.raises(ResourceExhausted, match="exceed the limit of 16777216"):
        writer.write({"x": np.zeros((1 << 24) + 1, np.uint8)})
    same(reader.copy(writer.write({"x": np.ones(3)})), {"x": np.ones(3)})


def test_any_layout_is_written(sides: tuple[TensorArena, TensorArena]) -> None:
    writer, reader = sides
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensors = {
        "columns": base[:, ::2],
        "turned": base.T,
        "backwards": base[::-1],
        "one": np.broadcast_to(base[0], (3, 6)),
    }
    same(reader.copy(writer.write(tensors)), tensors)


def test_views_are_read_only_and_copies_the_caller_s(sides: tuple[TensorArena, TensorArena]) -> None:
    writer, reader = sides
    slots = writer.write({"x": np.ones(4)})
    copied, viewed = reader.copy(slots)["x"], reader.view(slots)["x"]
    assert copied.flags.writeable
    assert not viewed.flags.writeable
    writer.write({"x": np.zeros(4)})
    assert copied.sum() == 4
    assert viewed.sum() == 0


def test_a_view_outlives_growth(sides: tuple[TensorArena, TensorArena]) -> None:
    writer, reader = sides
    view = reader.view(writer.write({"x": np.ones(4)}))["x"]
    reader.copy(writer.write({"x": np.ones(1 << 18)}))
    assert view.sum() == 4
    del view


def test_nobody_can_cut_it_off(sides: tuple[TensorArena, TensorArena]) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(sides[1].file, 0)


def test_closing_twice(sides: tuple[TensorArena, TensorArena]) -> None:
    sides[0].close()
    sides[0].close()


@pytest.mark.parametrize(
    ("datatype", "shape", "offset", "byte_size"),
    [
        (DataType.FP32, (6,), -1, 24),
        (DataType.FP32, (6,), -(1 << 20), 24),
        (DataType.BYTES, (1,), -8, 8),
        (DataType.FP32, (1 << 40,), 0, 24),
        (DataType.FP32, (-2, -3), 0, 24),
        (DataType.FP32, (0,), 0, 64),
        (DataType.FP32, (6,), 0, 20),
        (DataType.BYTES, (0,), 0, -4),
    ],
)
def test_slots_that_no_arena_writes_are_refused(
    sides: tuple[TensorArena, TensorArena], datatype: DataType, shape: tuple[int, ...], offset: int, byte_size: int
) -> None:
    # The process of a Python model announces them, and its model may do anything.
    writer, reader = sides
    writer.write({"x": np.zeros(6, np.float32)})
    with pytest.raises(PenstockError, match="outside of its memory"):
        reader.copy([TensorSlot("x", datatype, shape, offset, byte_size)])
