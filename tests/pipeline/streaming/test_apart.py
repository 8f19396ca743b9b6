"""Steps that hold the interpreter's lock, on threads and in processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from penstock.errors import InvalidInput, PenstockError
from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.apart import Movable, Place, Processes, next_place
from penstock.pipeline.streaming.binding import run_step
from penstock.pipeline.streaming.stage import Inputs
from penstock.pipeline.streaming.step_process import StepProcess
from random_functions import Plain, number

SLOW, FAST = [0.01] * 8, [0.001] * 8


@pytest.mark.parametrize(
    ("on_thread", "on_process", "is_ready", "place"),
    [
        ([], [], False, Place.THREAD),
        (FAST[:7], [], False, Place.THREAD),
        (FAST, [], False, Place.THREAD_FOREVER),
        (SLOW, [], False, Place.THREAD),
        (SLOW, [], True, Place.PROCESS),
        (SLOW, [0.01], True, Place.THREAD),
        ([*SLOW, 0.01], [0.01], True, Place.PROCESS),
        (SLOW * 2, [0.005] * 8, True, Place.PROCESS_FOREVER),
        (SLOW * 2, [0.009] * 8, True, Place.THREAD_FOREVER),
    ],
)
def test_the_decision(on_thread: list[float], on_process: list[float], is_ready: bool, place: Place) -> None:
    assert next_place(on_thread, on_process, is_ready) is place


def test_a_process_gives_the_results_and_the_errors_of_the_step(process: StepProcess) -> None:
    step, other = Plain(salt=1), Plain(salt=2)
    items: list[Inputs] = [{"x0": number(n)} for n in range(20)]
    for one in (step, other, step):
        for there, here in zip(process.run(one, items), run_step(one, items), strict=True):
            if isinstance(here, PenstockError):
                assert isinstance(there, InvalidInput)
                assert there.message == here.message
            else:
                assert not isinstance(there, PenstockError)
                np.testing.assert_array_equal(there["y"], here["y"])


class Echo(Plain, frozen=True, kw_only=True):
    """Returns its input."""

    def run(self, inputs: Mapping[str, object]) -> dict[str, object]:
        return {"y": inputs["x0"]}


@pytest.mark.parametrize("value", ["text", b"bytes" * 100_000, [np.zeros(3), "a"], np.arange(1_000_000), np.zeros(0)])
def test_any_value_can_be_sent(process: StepProcess, value: object) -> None:
    for _ in range(2):
        (told,) = process.run(Echo(salt=0), [{"x0": value}])
        assert not isinstance(told, PenstockError)
        np.testing.assert_equal(told["y"], value)


class Fake(StepProcess):
    """A process that runs in this one."""

    def __init__(self) -> None:
        self.calls = 0

    def wait(self) -> None:
        pass

    def run(self, step: object, items: Sequence[Inputs]) -> list[Told]:
        self.calls += 1
        if self.calls > 3:
            raise EOFError
        return [{"y": 0}] * len(items)

    def close(self) -> None:
        pass


def test_a_step_stays_on_threads_if_its_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    processes = Processes(1, Fake)
    run = Movable(object(), lambda items: [{"y": 1}] * len(items), processes)
    found = [run([{"x": 0}]) for _ in range(9)]
    processes.close()  # waits until the process has started
    found += [run([{"x": 0}]) for _ in range(20)]
    assert run.place is Place.THREAD_FOREVER
    assert found.count([{"y": 0}]) == 3
    assert found[-1] == [{"y": 1}]
