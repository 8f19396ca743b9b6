from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidArgument, NotFound
from penstock.online.server.answer_form import AnswerForm
from penstock.online.server.request_layout import (
    VARIABLE,
    BoundedCache,
    RequestLayout,
    SharedSlice,
    TensorLayout,
    check_names,
    find_datatype,
    read_slice,
    whole_number,
)
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.tensor import Array, DataType

X = TensorLayout("x", DataType.FP32, [1, 2], 8)


def test_a_cache_is_bounded() -> None:
    cache = BoundedCache[int, str]()
    for number in range(3000):
        assert cache.remember(number, str(number)) == cache[number] == str(number)
    assert len(cache) <= 1024


def test_names_and_datatypes() -> None:
    check_names(["x", "y"])
    with pytest.raises(InvalidArgument, match="input 'x' already exists in request"):
        check_names(["x", "y", "x"])
    assert find_datatype("x", "BF16") is DataType.BF16
    with pytest.raises(InvalidArgument, match="invalid datatype for input x: 'FP8'"):
        find_datatype("x", "FP8")


@pytest.mark.parametrize("number", [-1, 1.0, True, "1", None])
def test_numbers_that_are_none(number: Any) -> None:
    with pytest.raises(InvalidArgument, match="input 'x': 'n' must be a whole number, not"):
        whole_number("input 'x'", {"n": number}, "n")


def test_slices_of_shared_memory() -> None:
    size = {"shared_memory_byte_size": 8}
    assert read_slice("input 'x'", size) is None
    assert read_slice("input 'x'", {"shared_memory_region": "r", **size}) == SharedSlice("r", 0, 8)
    found = read_slice("input 'x'", {"shared_memory_region": "r", "shared_memory_offset": 4, **size})
    assert found == SharedSlice("r", 4, 8)
    for wrong in ({"shared_memory_region": 5, **size}, {"shared_memory_region": "r"}):
        with pytest.raises(InvalidArgument, match="input 'x': 'shared_memory_"):
            read_slice("input 'x'", wrong)


def test_outputs() -> None:
    layout = RequestLayout()
    layout.note_outputs(["y", "z"])
    layout.note_place("y", SharedSlice("r", 0, 8), is_classified=False)
    assert (layout.outputs, layout.placed) == (("y", "z"), [("y", SharedSlice("r", 0, 8))])
    with pytest.raises(InvalidArgument, match="an output is requested twice"):
        layout.note_outputs(["y", "y"])
    with pytest.raises(InvalidArgument, match="shared memory can't be used for output 'z' with classification"):
        layout.note_place("z", SharedSlice("r", 0, 8), is_classified=True)


def test_a_layout_without_shared_memory_leases_none() -> None:
    layout = RequestLayout(form=AnswerForm(classification={"y": 1}))
    assert layout.lease(SharedMemory(enabled=False), "m", {}) is layout.form


def test_a_lease_holds_inputs_and_places_and_is_released_where_one_is_wrong() -> None:
    path = Path("/dev/shm/penstock-test-layout")
    path.write_bytes(np.array([1, 2], np.float32).tobytes())
    memory = SharedMemory(enabled=True)
    memory.register("r", path.name, 0, 8)
    try:
        inputs: dict[str, Array] = {}
        layout = RequestLayout(shared=[(X, SharedSlice("r", 0, 8))], placed=[("y", SharedSlice("r", 0, 8))])
        form = layout.lease(memory, "m", inputs)
        assert inputs["x"].tolist() == [[1, 2]]
        form.placements["y"].write(np.array([3, 4], np.float32))
        form.release()
        assert np.frombuffer(path.read_bytes(), np.float32).tolist() == [3, 4]
        text = TensorLayout("t", DataType.BYTES, [1], VARIABLE)
        for tensor, part, error in (
            (X, SharedSlice("r", 0, 4), "Expected 8, got 4 in shared memory"),
            (text, SharedSlice("r", 0, 9), "Invalid offset"),
        ):
            wrong = RequestLayout(shared=[(X, SharedSlice("r", 0, 8)), (tensor, part)])
            with pytest.raises(InvalidArgument, match=error):
                wrong.lease(memory, "m", {})
        memory.forget("r")
        with pytest.raises(NotFound):
            layout.lease(memory, "m", {})
    finally:
        memory.close()
        path.unlink()
    assert not memory.has_regions
