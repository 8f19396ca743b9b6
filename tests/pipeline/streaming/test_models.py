"""Models as steps: rows are merged, and only the items that a model rejects fail."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from penstock.errors import InvalidInput, PenstockError
from penstock.pipeline.executor import Told
from penstock.pipeline.function import ModelStep
from penstock.pipeline.streaming.models import LocalModel, attempted, from_rows, guarded, run_rows, shapes_of
from penstock.tensor import Array, DataType, Signature, TensorSpec

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
