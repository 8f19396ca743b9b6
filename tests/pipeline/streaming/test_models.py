"""Models as steps: rows are merged, and only the items that a model rejects fail."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidInput, PenstockError
from penstock.pipeline.executor import Told
from penstock.pipeline.function import ModelStep
from penstock.pipeline.streaming.models import LocalModel, attempted, from_rows, guarded, run_rows, shapes_of
from penstock.pipeline.streaming.stages import Stages
from penstock.pipeline.value import Value
from penstock.tensor import Array, DataType, Signature, TensorSpec
from random_functions import Wiring, function_of

SIGNATURE = Signature((TensorSpec("x", DataType.FP32, (-1, 2)),), (TensorSpec("y", DataType.FP32, (-1, 2)),))
STEP = ModelStep("net", SIGNATURE, batchable=True, max_batch=8, with_batch=frozenset({"x", "y"}))


class Doubler:
    """Doubles its input, and refuses calls with a negative number."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.rows.append(len(inputs["x"]))
        if (inputs["x"] < 0).any():
            raise InvalidInput("negative")
        return {"y": inputs["x"] * 2}


def items(*values: float) -> list[dict[str, Array]]:
    return [{"x": np.full(2, value, np.float32)} for value in values]


def firsts(outcomes: list[Told]) -> list[float | str]:
    return [told.message if isinstance(told, PenstockError) else float(told["y"][0]) for told in outcomes]


def test_items_run_as_the_rows_of_one_call() -> None:
    model = Doubler()
    found = run_rows(STEP, LocalModel(model.forward, 8), items(1, 2, 3))
    assert firsts(found) == [2, 4, 6]
    assert model.rows == [3]


def test_only_the_rejected_item_fails() -> None:
    model = Doubler()
    assert firsts(run_rows(STEP, LocalModel(model.forward, 8), items(1, -2, 3))) == [2, "negative", 6]
    assert model.rows == [3, 1, 1, 1]


def test_calls_merge_if_their_tensors_have_one_form() -> None:
    one, two = items(1, 2)
    free = Signature((TensorSpec("x", DataType.FP32, (-1, -1)),), SIGNATURE.outputs)
    step = msgspec.structs.replace(STEP, signature=free)
    assert shapes_of(step, one) == shapes_of(step, two)
    assert shapes_of(step, one) != shapes_of(step, {"x": np.zeros(3, np.float32)})
    assert shapes_of(step, one) != shapes_of(step, {"x": np.zeros(2, np.float64)})


def test_an_error_keeps_no_traceback() -> None:
    told = attempted(Doubler().forward, {"x": np.array([-1.0])})
    assert isinstance(told, InvalidInput)
    assert told.__traceback__ is None
    assert from_rows(STEP, told) is told


def test_a_guard_holds_for_all_threads() -> None:
    inside, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def forward(inputs: Mapping[str, Array]) -> dict[str, Array]:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        if inputs["x"][0]:
            both.wait(30)  # passes only if two calls run at a time
        with lock:
            inside -= 1
        return {}

    for calls, meets in ((1, False), (2, True)):
        most = 0
        model = guarded(LocalModel(forward, calls=calls))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(model.forward, [{"x": np.array([meets])}] * 20))
        assert most <= calls
    assert most == 2
    free = LocalModel(forward, calls=0)
    assert guarded(free) is free


def test_calls_go_to_copies_that_are_free() -> None:
    both, used = threading.Barrier(2), [0, 0]
    locks = [threading.Lock(), threading.Lock()]

    def copy(number: int) -> LocalModel:
        def forward(inputs: Mapping[str, Array]) -> dict[str, Array]:
            assert locks[number].acquire(blocking=False), "one call at a time"
            both.wait(30)  # passes only if the other copy runs, too
            used[number] += 1
            locks[number].release()
            if inputs["x"][0]:
                raise InvalidInput("wrong")
            return {}

        return LocalModel(forward, max_batch=8)

    model = guarded(copy(0), copy(1))
    assert (model.calls, model.max_batch) == (2, 8)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: attempted(model.forward, {"x": np.array([n % 3])}), range(20)))
    assert used == [10, 10]
    assert [isinstance(told, InvalidInput) for told in found] == [n % 3 > 0 for n in range(20)]


SHAPES = [
    (),
    (2,),
    (2, 3),
    (2, 3, 1),
    (2, 3, 4),
    (2, 3, 5),
    (2, 1, 4),
    (1, 3, 4),
    (2, 3, 4, 1),
    (2, 3, 4, 2),
    (2, 0, 4),
]
DTYPES = [np.float32, np.float64, np.float16, np.int64, np.bool_]
STREAMS = st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=2, max_size=24)


class Summed:
    """The sum over the last axis, in the datatype of the input."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        x = inputs["x"]
        self.rows.append(len(x))
        return {"y": x.sum(axis=-1, dtype=x.dtype)}


def streamed_and_single(rank: int, forms: list[tuple[tuple[int, ...], type]], threads: int) -> list[int]:
    """Compare a stream with single calls, for a model of inputs with ``rank`` axes. The numbers of rows of the stream's calls."""
    free = Signature(
        (TensorSpec("x", DataType.FP32, (-1,) * (rank + 1)),), (TensorSpec("y", DataType.FP32, (-1,) * rank),)
    )
    step = msgspec.structs.replace(STEP, signature=free)
    model = Summed()
    stages = Stages(function_of(Wiring(), step), {"net": LocalModel(model.forward, 8, is_tuned=True)})
    rng = np.random.default_rng(len(forms))
    given: list[dict[str, Value]] = [{"x": rng.integers(0, 9, shape).astype(dtype)} for shape, dtype in forms]
    wanted = [attempted(stages.call, item) for item in given]
    model.rows.clear()
    found = list(stages.stream(given, ahead=64, threads=threads))
    for want, told in zip(wanted, found, strict=True):
        if isinstance(want, PenstockError):
            assert str(told) == str(want)
            continue
        assert not isinstance(told, PenstockError), told
        for name, value in want.items():
            assert (told[name].dtype, told[name].shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(told[name], value)
    return model.rows


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), STREAMS, st.sampled_from([0, 2]))
def test_items_of_any_forms_in_a_stream_are_answered_as_alone(
    rank: int, forms: list[tuple[tuple[int, ...], type]], threads: int
) -> None:
    streamed_and_single(rank, forms, threads)


@pytest.mark.parametrize("threads", [0, 2])
def test_only_calls_of_one_form_are_merged(threads: int) -> None:
    forms = [((2, 3, n % 2 + 1), (np.float32, np.int64)[n // 2 % 2]) for n in range(64)] + [((2, 3), np.float32)]
    rows = streamed_and_single(3, [*forms], threads)
    assert sum(rows) == 64
    assert max(rows) > 1
