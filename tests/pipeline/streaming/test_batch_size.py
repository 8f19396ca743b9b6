"""The size of a model's batches, learnt from the time of its calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.batch_size import BatchSize
from penstock.pipeline.streaming.fairness import Flow, Flows, Item
from penstock.pipeline.streaming.stage import Inputs, StageCall, StageQueue, StageSpec, take


def nothing(items: Sequence[Inputs]) -> list[Told]:
    return [{} for _ in items]


def learnt(most: int, seconds: Callable[[int, int], float]) -> tuple[int, list[int]]:
    """The size after many full batches, of which number n with r rows takes ``seconds(r, n)``, and all sizes on the way."""
    size, seen = BatchSize(nothing, most), list[int]()
    for number in range(100):
        seen.append(size.rows())
        size.note(size.rows(), seconds(size.rows(), number))
    return size.rows(), list(dict.fromkeys(seen))


@pytest.mark.parametrize(
    ("most", "row_s", "size"),
    [
        (64, {1: 5.0, 4: 4.0, 16: 3.0, 64: 2.0}, 64),
        (64, {1: 5.0, 4: 4.0, 16: 4.0, 64: 1.0}, 4),
        (64, {1: 5.0, 4: 9.0}, 1),
        (64, {1: 5.0, 4: 4.9}, 1),
        (6, {1: 5.0, 4: 4.0, 6: 3.0}, 6),
        (2, {1: 5.0, 2: 4.0}, 2),
        (1, {1: 1.0}, 1),
    ],
    ids=["largest", "until no gain", "slower", "too little gain", "no power of four", "two", "one"],
)
def test_batches_become_larger_while_that_is_faster(most: int, row_s: dict[int, float], size: int) -> None:
    assert learnt(most, lambda rows, _: rows * row_s[rows])[0] == size


def test_a_few_batches_suffice_if_larger_ones_are_not_faster() -> None:
    size, seen = BatchSize(nothing, 64), list[int]()
    for _ in range(20):
        seen.append(size.rows())
        size.note(size.rows(), float(size.rows()))
    assert seen == [1, 4] * 4 + [1] * 12


def test_slow_calls_among_fast_ones_do_not_count() -> None:
    """Another program may take the cores for most calls."""
    assert learnt(4, lambda rows, number: rows * (1.0 if number in (4, 5) else 9.0 - rows))[0] == 1


def test_a_machine_that_becomes_faster_does_not_decide() -> None:
    """Both sizes are tried in turn."""
    assert learnt(64, lambda rows, number: rows * (1.0 if rows == 1 else 1.5) / (1 + 0.01 * number))[0] == 1


def test_the_size_stays_once_it_is_decided() -> None:
    assert learnt(64, lambda rows, number: rows * (1.0 if rows == 1 else 1.5) * (1 + number)) == (1, [1, 4])


def test_batches_of_other_sizes_do_not_count() -> None:
    size = BatchSize(nothing, 8)
    for _ in range(50):
        size.note(8, 0.001)
        size.note(3, 0.001)
    for _ in range(4):
        assert size.rows() == 1
        size.note(1, 1.0)
        assert size.rows() == 4
        size.note(4, 8.0)
    assert size.rows() == 1


def test_a_model_is_timed_by_its_calls() -> None:
    def steady(items: Sequence[Inputs]) -> list[Told]:
        time.sleep(0.005)
        return [dict(item) for item in items]

    size, items = BatchSize(steady, 4), [{"n": "0"}, {"n": "1"}, {"n": "2"}, {"n": "3"}]
    for _ in range(20):
        some = items[: size.rows()]
        assert size(some) == some
    assert size.rows() == 4


def test_several_threads_decide_once() -> None:
    def work() -> None:
        for _ in range(200):
            size.note(size.rows(), 1.0)

    size = BatchSize(nothing, 64)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert size.rows() == 64  # a call takes as long with four times as many rows


def test_a_stage_takes_batches_of_the_present_size() -> None:
    rows, flow = [4], Flow(Flows())
    stage = StageQueue(StageSpec("net", nothing, max_batch=4, waits=True, size=lambda: rows[0]), 0)
    other = StageQueue(StageSpec("decode", nothing), 0)
    for number in range(3):
        stage.add(StageCall(Item(number, flow), {}, lambda _: None))
    other.add(StageCall(Item(9, flow), {}, lambda _: None))
    batch = take([stage, other])
    assert batch is not None
    assert batch.stage is other  # three calls do not fill a batch of four
    rows[0] = 2
    other.add(StageCall(Item(9, flow), {}, lambda _: None))
    batch = take([stage, other])
    assert batch is not None
    assert (batch.stage, [call.item.number for call in batch.calls]) == (stage, [0, 1])
