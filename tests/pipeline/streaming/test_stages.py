"""Streams with real threads: order, errors of items, back-pressure, and threads that end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidInput, PenstockError
from penstock.pipeline.function import Function
from penstock.pipeline.streaming.models import LocalModel
from penstock.pipeline.streaming.stages import Stages
from penstock.pipeline.streaming.timeline import Timeline
from penstock.pipeline.value import Value
from penstock.tensor import Array
from pipelines import LOCAL, WEIGHT
from pipelines import function as function_from
from random_functions import MODEL, MODELS, Plain, Wiring, expected, function_of, functions, number


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
    before, threads = sys.getswitchinterval(), threading.active_count()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
    assert threading.active_count() == threads


def inputs_of(values: list[int]) -> Iterator[dict[str, Value]]:
    return ({"x": number(value)} for value in values)


def check(function: Function, value: int, told: Mapping[str, Value] | PenstockError) -> None:
    should = expected(function, number(value))
    if should is None:
        assert isinstance(told, PenstockError)
        assert "is bad" in told.message
    else:
        assert not isinstance(told, PenstockError), told
        assert {name: int(array[0]) for name, array in told.items()} == should


@settings(max_examples=60, deadline=None)
@given(functions(), st.lists(st.integers(0, 999), max_size=20), st.integers(1, 8), st.integers(0, 3))
def test_a_stream_keeps_the_order_and_the_errors_of_its_items(
    function: Function, values: list[int], ahead: int, threads: int
) -> None:
    told = list(Stages(function, MODELS).stream(inputs_of(values), ahead=ahead, threads=threads))
    assert len(told) == len(values)
    for value, one in zip(values, told, strict=True):
        check(function, value, one)


@settings(max_examples=60, deadline=None)
@given(functions(), st.integers(0, 999))
def test_a_call_gives_the_same_as_a_stream(function: Function, value: int) -> None:
    stages = Stages(function, MODELS)
    try:
        check(function, value, stages.call({"x": number(value)}))
    except PenstockError as error:
        check(function, value, error)


@settings(max_examples=40, deadline=None)
@given(functions(), st.integers(1, 6), st.integers(0, 12), st.integers(1, 3))
def test_the_input_is_not_read_further_ahead_than_the_bound(
    function: Function, ahead: int, taken: int, threads: int
) -> None:
    read = 0

    def endless() -> Iterator[dict[str, Value]]:
        nonlocal read
        while True:
            read += 1
            yield {"x": number(read)}

    stream = Stages(function, MODELS).stream(endless(), ahead=ahead, threads=threads)
    for n in range(taken):
        check(function, n + 1, next(stream))
        assert read <= n + ahead
    stream.close()  # type: ignore[attr-defined]
    assert read <= max(0, taken - 1) + ahead


def test_an_error_of_the_input_comes_after_the_items_before() -> None:
    def failing() -> Iterator[dict[str, Value]]:
        yield from inputs_of([1, 2, 3])
        raise OSError("the camera is gone")

    stream = Stages(function_of(Wiring(), Plain(salt=1)), {}).stream(failing(), threads=2)
    assert [next(stream) for _ in range(3)] == [{"y": number(n)} for n in (2, 3, 4)]
    with pytest.raises(OSError, match="camera"):
        next(stream)


class Gate:
    """A model whose calls wait until the test opens the gate, and that records the number of rows of each call."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.rows: list[int] = []

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.rows.append(len(inputs["x"]))
        self.entered.set()
        assert self.open.wait(30)
        return {"y": inputs["x"] + 1}


def test_calls_that_wait_for_a_busy_model_run_as_one_batch() -> None:
    gate, timeline = Gate(), Timeline()
    stages = Stages(function_of(Wiring(), MODEL), {"model": LocalModel(gate.forward, max_batch=4)})

    def values() -> Iterator[dict[str, Value]]:
        yield {"x": number(0)}
        assert gate.entered.wait(30)
        yield from inputs_of([1, 2, 3, 4])
        gate.open.set()

    told = list(stages.stream(values(), ahead=8, threads=2, timeline=timeline))
    assert [int(one["y"][0]) for one in told if not isinstance(one, PenstockError)] == [1, 2, 3, 4, 5]
    assert gate.rows == [1, 4]
    assert sorted(len(span.items) for span in timeline.spans) == [1, 4]


def test_close_waits_for_the_step_in_progress_and_drops_the_rest() -> None:
    gate = Gate()
    stages = Stages(function_of(Wiring(), MODEL), {"model": LocalModel(gate.forward, max_batch=1)})

    def values() -> Iterator[dict[str, Value]]:
        yield {"x": number(0)}
        assert gate.entered.wait(30)
        gate.open.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(stages.stream(values(), threads=1))
    assert gate.rows == [1]


def test_a_model_that_is_not_reentrant_runs_one_call_at_a_time_in_several_threads() -> None:
    inside, most = 0, 0

    def forward(inputs: Mapping[str, Array]) -> dict[str, Array]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        np.sort(np.arange(1000))
        inside -= 1
        return {"y": inputs["x"]}

    stages = Stages(function_of(Wiring(), MODEL), {"model": LocalModel(forward)})
    threads = [threading.Thread(target=lambda: [stages.call({"x": number(1)}) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_bug_in_a_step_fails_its_item_only() -> None:
    class Broken(Plain, frozen=True, kw_only=True):
        def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
            return {"y": inputs["x0"].no_such_attribute}

    function = function_of(Wiring(), Broken(salt=0))
    (told,) = Stages(function, {}).stream(inputs_of([1]), threads=1)
    assert isinstance(told, PenstockError)
    assert told.message == "step 's0': internal error"


class Elsewhere:
    """A model behind a thread of its own."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def start(self, item: int, inputs: dict[str, Array], done: object) -> None:
        def answer() -> None:
            if int(inputs["x"][0, 0]) == 3:
                done(InvalidInput("three"))  # type: ignore[operator]
            else:
                done({"y": inputs["x"] * 2})  # type: ignore[operator]

        self.threads.append(threading.Thread(target=answer))
        self.threads[-1].start()


@pytest.mark.parametrize("threads", [0, 2])
def test_a_model_may_run_elsewhere(threads: int) -> None:
    model = Elsewhere()
    stages = Stages(function_of(Wiring(), MODEL, Plain(salt=1)), {"model": model})
    told = list(stages.stream(inputs_of([1, 2, 3, 4]), threads=threads))
    for thread in model.threads:
        thread.join()
    assert [str(one) if isinstance(one, PenstockError) else int(one["y"][0]) for one in told] == [
        3,
        5,
        "step 's0': three",
        9,
    ]


@pytest.mark.parametrize(("seconds", "size"), [(lambda rows: 0.002, 8), (lambda rows: 0.001 * rows**2, 1)])
def test_the_batch_of_a_model_is_learnt_and_kept(seconds: Callable[[int], float], size: int) -> None:
    calls: list[int] = []

    def forward(inputs: Mapping[str, Array]) -> dict[str, Array]:
        rows = len(inputs["x"])
        calls.append(rows)
        time.sleep(seconds(rows))
        return LOCAL["linear"].forward(inputs)

    function = function_from(outputs=["label", "p", "logits"])
    stages = Stages(function, {"linear": LocalModel(forward, max_batch=8)}, ["logits"])
    features = [np.array([n, -n, n % 7], np.float32) for n in range(150)]
    for _ in range(2):
        calls.clear()
        told = list(stages.stream({"features": one} for one in features))
        for one, outputs in zip(features, told, strict=True):
            assert not isinstance(outputs, PenstockError)
            np.testing.assert_allclose(outputs["logits"], one @ WEIGHT, rtol=1e-6)
    assert sum(calls) == 150
    assert (max(calls), calls.count(size) > len(calls) / 2) == (size, True)
