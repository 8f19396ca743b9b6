"""Results in memory, and the items that wait because of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.pipeline.executor import Told
from penstock.pipeline.function import Function
from penstock.pipeline.streaming import memory
from penstock.pipeline.streaming.binding import bind
from penstock.pipeline.streaming.line import Line
from penstock.pipeline.streaming.memory import Memory
from penstock.pipeline.streaming.stage import StageBatch
from penstock.pipeline.value import Value
from penstock.tensor import Array
from random_functions import MODELS, Plain, Wiring, expected, finished, functions, number

SIZE = 1 << 20
LARGE = SIZE + (SIZE >> 1)
"""Two arrays are more, and one is not."""


def array() -> Array:
    return np.zeros(SIZE, np.uint8)


def test_an_array_counts_until_it_is_freed() -> None:
    counted = Memory(LARGE)
    first, view = array(), array()[1:]
    counted.add({"a": first, "b": [view, b"text"]})
    assert counted.is_full
    del view
    assert not counted.is_full
    counted.add({"c": first[10:]})
    assert not counted.is_full, "it is the same memory"
    second = array()
    counted.add({"d": second})
    assert counted.is_full
    counted.forget({"d": second})
    assert not counted.is_full
    counted.add(PenstockError("none"))


def test_small_results_are_not_counted() -> None:
    counted = Memory(0)
    kept = np.zeros(1000, np.uint8)
    counted.add({"a": kept})
    assert not counted.is_full


class Enlarge(Plain, frozen=True, kw_only=True):
    """A large array."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        return {"y": np.full((1, SIZE), inputs["x0"][0])}


class Reduce(Plain, frozen=True, kw_only=True):
    """Its first element."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        return {"y": inputs["x0"][0, :1].copy()}


def pipeline() -> Function:
    wiring = Wiring()
    large = wiring.add(Enlarge(salt=0), ["x"])
    small = wiring.add(Reduce(salt=0), [large])
    return finished(wiring, {small: "y"})


def items(batches: list[StageBatch | None]) -> list[int]:
    return [call.item.number for batch in batches if batch is not None for call in batch.calls]


def finish(line: Line, batches: list[StageBatch | None]) -> None:
    for batch in batches:
        assert batch is not None
        line.workers.finish(batch, batch.stage.spec.run(batch.inputs))


def test_while_the_memory_is_full_only_started_items_and_the_oldest_run() -> None:
    told: list[Told] = []
    line = Line(bind(pipeline(), {}), max_bytes=0)
    for item in range(4):
        line.begin(item, {"x": number(item)}, told.append)
    enlarged = [line.workers.take(), line.workers.take()]
    finish(line, enlarged)
    assert items(enlarged) == [0, 1]
    enlarged.clear()
    reduced = [line.workers.take(), line.workers.take()]
    assert items(reduced) == [0, 1], "they have been started"
    assert line.workers.take() is None, "the memory is full"
    finish(line, reduced)
    reduced.clear()
    more = [line.workers.take()]
    assert items(more) == [2], "the memory is free again"
    finish(line, more)
    more.clear()
    line.workers.run_ready()
    assert told == [{"y": item} for item in range(4)]


@settings(max_examples=60, deadline=None)
@given(functions(), st.lists(st.integers(0, 999), min_size=1, max_size=8), st.integers(1, 3), st.integers(0, 100))
def test_all_items_end_whatever_the_limit(function: Function, values: list[int], threads: int, limit: int) -> None:
    told: dict[int, Told] = {}
    before, memory.SMALL_BYTES = memory.SMALL_BYTES, 1
    try:
        with Line(bind(function, MODELS), threads, max_bytes=limit) as line:
            for item, value in enumerate(values):
                line.begin(item, {"x": number(value)}, lambda one, item=item: told.update({item: one}))  # type: ignore[misc]
            line.wait(lambda: len(told) == len(values))
    finally:
        memory.SMALL_BYTES = before
    for item, value in enumerate(values):
        should, found = expected(function, number(value)), told[item]
        if isinstance(found, PenstockError):
            assert should is None
        else:
            assert {name: int(one[0]) for name, one in found.items()} == should


def test_the_default_limit_follows_the_machine() -> None:
    assert [memory.default_limit(size << 20) for size in (0, 256, 512, 1024, 16_384)] == [
        size << 20 for size in (64, 64, 64, 128, 2_048)
    ]
