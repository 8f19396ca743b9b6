"""Records reach the sink in order, or are dropped and counted; callers never wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from penstock.telemetry.background_writer import BackgroundWriter


class Kept:
    """A sink that can be made to wait and to fail."""

    def __init__(self) -> None:
        self.records: list[int] = []
        self.failing = False
        self.closed = False
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()

    def write(self, records: Sequence[int]) -> None:
        self.entered.set()
        self.go.wait()
        if self.failing:
            raise OSError("no space left on device")
        self.records += records

    def close(self) -> None:
        self.closed = True


def test_everything_is_written_in_order_by_another_thread_and_the_sink_is_closed() -> None:
    sink = Kept()
    writer = BackgroundWriter("test", sink)
    writer.start()
    for number in range(5000):
        writer.put(number)
    writer.stop()
    assert sink.records == list(range(5000))
    assert sink.closed
    assert writer.dropped == 0


def test_what_comes_while_the_sink_is_behind_is_dropped_and_counted() -> None:
    sink = Kept()
    sink.go.clear()
    writer = BackgroundWriter("test", sink, limit=10)
    writer.start()
    writer.put(0)
    sink.entered.wait()
    for number in range(1, 100):
        writer.put(number)
    assert writer.dropped == 89
    sink.go.set()
    writer.stop()
    assert sink.records == list(range(11))
    writer.put(0)
    assert writer.dropped == 90


def test_a_sink_that_fails_is_told_of_once_and_may_recover(caplog: pytest.LogCaptureFixture) -> None:
    sink = Kept()
    writer = BackgroundWriter("access log", sink, limit=10)
    sink.failing = True
    with caplog.at_level(logging.WARNING):
        writer._write([1, 2])
        writer._write([3])
        sink.failing = False
        writer._write([4])
    assert writer.dropped == 3
    assert sink.records == [4]
    assert [record.getMessage() for record in caplog.records] == [
        "access log: records are being lost: no space left on device"
    ]


def test_stopping_does_not_wait_for_a_sink_that_hangs() -> None:
    sink = Kept()
    sink.go.clear()
    writer = BackgroundWriter("test", sink)
    writer.start()
    writer.put(1)
    sink.entered.wait()
    writer.stop(timeout_s=0.01)
    assert not sink.closed
    sink.go.set()


def test_one_that_was_never_started_can_be_stopped() -> None:
    BackgroundWriter("test", Kept()).stop()
