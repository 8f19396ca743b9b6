from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidData
from penstock.samples.iterable import gather
from penstock.tensor import DataType, Signature, TensorSpec

ROWS = Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), (TensorSpec("y", DataType.FP32, (-1, 4)),))


def test_an_iterator_is_read_once_and_its_samples_many_times() -> None:
    data = gather(iter([{"x": [1.0, 2, 3]}, {"x": np.float32([4, 5, 6])}]), ROWS, "the data")
    for _ in range(2):
        np.testing.assert_array_equal(data.inputs["x"], [[1, 2, 3], [4, 5, 6]])


def test_samples_are_not_kept_in_memory() -> None:
    alive = list[weakref.ref[np.ndarray]]()

    def samples() -> Iterator[dict[str, np.ndarray]]:
        for number in range(5):
            gc.collect()
            assert sum(array() is not None for array in alive) <= 1
            x = np.full(3, number, np.float32)
            alive.append(weakref.ref(x))
            yield {"x": x}

    assert gather(samples(), ROWS, "the data").count == 5


def failing() -> Iterator[dict[str, Any]]:
    yield {"x": [1.0, 2, 3]}
    raise ValueError("the disk is gone")


def leaving() -> Iterator[dict[str, Any]]:
    yield {"x": [1.0, 2, 3]}
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("samples", "cause"),
    [
        (failing(), "the data failed at sample 1: ValueError: the disk is gone"),
        (leaving(), "the data failed at sample 1: SystemExit: 0"),
        (3, "the data failed at sample 0: TypeError"),
        ([{"x": [1.0, 2, 3]}, ([1.0, 2, 3], 0)], "sample 1 of the data is of type tuple"),
    ],
)
def test_an_iterable_that_fails_is_told_with_its_place(samples: Any, cause: str) -> None:
    with pytest.raises(InvalidData, match=cause):
        gather(samples, ROWS, "the data")
