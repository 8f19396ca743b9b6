"""Items in progress, with every order of starts, ends and cancellations that the test draws. No thread runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Cancelled, PenstockError
from penstock.pipeline.executor import Told, Work
from penstock.pipeline.function import Function, MapStep
from penstock.pipeline.streaming import line
from penstock.pipeline.streaming.binding import bind
from penstock.pipeline.streaming.line import Line
from penstock.pipeline.streaming.stage import StageBatch
from penstock.pipeline.value import Value
from penstock.tensor import Array
from random_functions import (
    MODEL,
    MODELS,
    Plain,
    Vectorised,
    Wiring,
    expected,
    finished,
    function_of,
    functions,
    number,
)

ITEMS = st.lists(st.integers(0, 999), min_size=1, max_size=8)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Collections leave out the objects of the tests before, which take a second each time."""
    gc.collect()
    gc.freeze()


class Bench:
    """A line whose workers are played by the test: ``held`` are the batches in progress."""

    def __init__(self, function: Function, max_bytes: int = 1 << 30) -> None:
        self.line = Line(bind(function, MODELS), max_bytes=max_bytes)
        self.told: dict[int, list[Told]] = {}
        self.held: list[StageBatch] = []
        self.alive: list[weakref.ref[Array]] = []

    def begin(self, value: int) -> None:
        item, x = len(self.told), number(value)
        self.told[item] = []
        self.alive.append(weakref.ref(x))
        self.line.begin(item, {"x": x}, self.told[item].append)

    def take(self) -> bool:
        if (batch := self.line.workers.take()) is not None:
            self.held.append(batch)
        return batch is not None

    def finish(self, place: int) -> None:
        batch = self.held.pop(place % len(self.held))
        self.line.workers.finish(batch, batch.stage.spec.run(batch.inputs))

    def run_out(self) -> None:
        while self.take() or self.held:
            if self.held:
                self.finish(0)


@settings(max_examples=200, deadline=None)
@given(functions(), ITEMS, st.data())
def test_every_item_gets_its_one_outcome_in_any_order_of_events(
    function: Function, values: list[int], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line, "_WINDOW", data.draw(st.sampled_from([1, 2, 256]), "window"))
        check_every_item(function, values, data)


def check_every_item(function: Function, values: list[int], data: st.DataObject) -> None:
    bench, waiting, cancelled = Bench(function), list(values), set()
    for _ in range(data.draw(st.integers(0, 60), "events")):
        event = data.draw(st.sampled_from(["begin", "take", "take", "finish", "finish", "cancel"]))
        if event == "begin" and waiting:
            bench.begin(waiting.pop(0))
        elif event == "take" and len(bench.held) < 4:
            bench.take()
        elif event == "finish" and bench.held:
            bench.finish(data.draw(st.integers(0, 3)))
        elif event == "cancel" and bench.told:
            item = data.draw(st.integers(0, len(bench.told) - 1))
            if not bench.told[item]:
                cancelled.add(item)
            bench.line.cancel(item)
    while waiting:
        bench.begin(waiting.pop(0))
    bench.run_out()
    for item, value in enumerate(values):
        (told,) = bench.told[item]
        should = expected(function, number(value))
        if item in cancelled:
            assert isinstance(told, Cancelled)
        elif should is None:
            assert isinstance(told, PenstockError)
            assert "is bad" in told.message
        else:
            assert not isinstance(told, PenstockError), told
            assert {name: int(array[0]) for name, array in told.items()} == should
    assert bench.line.is_empty


@settings(max_examples=60, deadline=None)
@given(functions(), ITEMS, st.integers(0, 10))
def test_close_cancels_all_items_and_keeps_no_value(function: Function, values: list[int], events: int) -> None:
    bench = Bench(function)
    for value in values:
        bench.begin(value)
    for _ in range(events):
        bench.take()
    bench.line.close()
    while bench.held:
        bench.finish(0)
    bench.run_out()
    assert all(len(told) == 1 for told in bench.told.values())
    assert bench.line.is_empty
    bench.told.clear()
    gc.collect()
    assert not any(ref() is not None for ref in bench.alive)


@settings(max_examples=100, deadline=None)
@given(functions(), ITEMS)
def test_an_ended_item_releases_its_values_without_a_garbage_collection(function: Function, values: list[int]) -> None:
    bench = Bench(function)
    gc.disable()
    try:
        for value in values:
            bench.begin(value)
        bench.run_out()
        bench.told.clear()
        assert not any(ref() is not None for ref in bench.alive)
    finally:
        gc.enable()


class Many(Plain, frozen=True, kw_only=True):
    """A list of ``salt`` numbers."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        return {"y": [inputs["x0"]] * self.salt}


class Count(Plain, frozen=True, kw_only=True):
    """The length of a list."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        return {"y": np.array([len(inputs["x0"])])}


def test_few_elements_of_a_long_list_are_in_progress() -> None:
    wiring = Wiring()
    spread = wiring.add(Many(salt=20_000), ["x"])
    mapped = wiring.add(MapStep("x", "x", function_of(Wiring(), Vectorised(salt=1))), [spread], ["x"])
    bench = Bench(finished(wiring, {wiring.add(Count(salt=0), [mapped]): "y"}))
    bench.begin(3)
    assert bench.take()
    bench.finish(0)
    while bench.take():
        pass
    assert sum(len(batch.calls) for batch in bench.held) == 256
    bench.run_out()
    (told,) = bench.told[0]
    assert not isinstance(told, PenstockError)
    assert int(told["y"][0]) == 20_000
    assert bench.line.is_empty


class Later:
    """A model elsewhere, whose calls the test answers. It multiplies by 3."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Array, Callable[[Told], None]]] = []

    def start(self, item: int, inputs: dict[str, Array], done: Callable[[Told], None]) -> Work | None:
        self.waiting.append((inputs["x"], done))
        return self

    def cancel(self) -> None:
        raise NotImplementedError

    def answer(self, place: int) -> None:
        x, done = self.waiting.pop(place)
        done({"y": x * 3})


@pytest.mark.parametrize("count", [0, 1, 2, 256, 257, 600])
@pytest.mark.parametrize("order", ["last first", "random"])
def test_results_of_a_map_are_in_the_order_of_its_elements(count: int, order: str) -> None:
    model, told, random = Later(), list[Told](), Random(count)
    wiring = Wiring()
    mapped = wiring.add(MapStep("x", "x", function_of(Wiring(), MODEL)), ["x"], ["x"])
    bound = Line(bind(finished(wiring, {mapped: "y"}), {"model": model}))
    bound.begin(0, {"x": [np.array([n]) for n in range(count)]}, told.append)
    while model.waiting:
        assert not told
        model.answer(-1 if order == "last first" else random.randrange(len(model.waiting)))
    (outcome,) = told
    assert not isinstance(outcome, PenstockError), outcome
    assert [one.tolist() for one in outcome["y"]] == [[3 * n] for n in range(count)]
    assert bound.is_empty
