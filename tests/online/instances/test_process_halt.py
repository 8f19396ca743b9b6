from __future__ import annotations

import pytest

from penstock.errors import Unavailable
from penstock.online.instances.process_halt import Halt


class Process:
    def __init__(self, used_s: float | None = None) -> None:
        self.ended = 0
        self._used_s = used_s

    def used_s(self) -> float | None:
        return self._used_s

    def end_at_once(self) -> None:
        self.ended += 1


def test_only_processes_that_are_still_loading_are_ended() -> None:
    halt, loading, loaded = Halt(), Process(), Process()
    for process in (loading, loaded):
        halt.hold(process)
    halt.release(loaded)
    halt.release(loaded)
    assert halt.reason == ""
    halt.end("the server stops")
    assert (loading.ended, loaded.ended) == (1, 0)


def test_nothing_is_loaded_any_more_and_nothing_is_ended_twice() -> None:
    halt, process = Halt(), Process()
    halt.hold(process)
    halt.end("the server stops")
    halt.end("the server stops again")
    assert process.ended == 1
    with pytest.raises(Unavailable, match="the server stops again"):
        halt.hold(Process())


def test_a_process_may_release_itself_while_it_is_ended() -> None:
    halt = Halt()

    class Releasing(Process):
        def end_at_once(self) -> None:
            super().end_at_once()
            halt.release(self)

    process = Releasing()
    halt.hold(process)
    halt.end("now")
    assert process.ended == 1


def test_the_processes_use_what_each_of_them_uses() -> None:
    halt, first, second = Halt(), Process(0.5), Process(1.5)
    assert halt.used_s() is None
    halt.hold(first)
    halt.hold(second)
    assert halt.used_s() == 2
    halt.release(first)
    assert halt.used_s() == 1.5
    halt.hold(Process())
    assert halt.used_s() is None
