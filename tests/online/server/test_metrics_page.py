"""The metrics page of one process, and of several processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec

from penstock import __version__
from penstock.online.server.metrics_page import LoopLag, MetricsPage, Report, merged
from penstock.telemetry.metrics import ServerFacts
from penstock.telemetry.statistics import ModelStatistics
from penstock.telemetry.usage import ProcessUsage


def lines(page: bytes) -> dict[str, str]:
    return dict(line.rsplit(" ", 1) for line in page.decode().splitlines() if not line.startswith("#"))


def test_the_page_of_one_process() -> None:
    models = [ModelStatistics("m", "1", pending=5)]
    page = MetricsPage(lambda: models, lambda: {"http": 2}, lambda: 99, lambda: 3)
    before = lines(asyncio.run(page.render()))
    assert before['nv_inference_pending_request_count{model="m",version="1"}'] == "5"
    assert before['penstock_connections{protocol="http"}'] == "2"
    assert before["penstock_inflight_bytes"] == "99"
    assert before["penstock_records_dropped_total"] == "3"
    assert before[f'penstock_build_info{{version="{__version__}"}}'] == "1"
    assert int(before["penstock_process_resident_memory_bytes"]) > 10**6
    assert abs(float(before["penstock_start_time_seconds"]) - time.time()) < 3600
    assert "nv_cpu_memory_total_bytes" in before
    models.clear()
    assert not any("model=" in name for name in lines(asyncio.run(page.render())))


def test_the_page_of_several_processes_shows_the_sums() -> None:
    own = MetricsPage(lambda: [ModelStatistics("m", "1", pending=5)], lambda: {"http": 2}, lambda: 9)
    other = MetricsPage(
        lambda: [ModelStatistics("m", "1", pending=6), ModelStatistics("n", "1")],
        lambda: {"http": 1, "h2": 4},
        lambda: 90,
    )
    sent = msgspec.msgpack.encode(other.report())
    shown = lines(asyncio.run(own.render([msgspec.msgpack.decode(sent, type=Report)])))
    assert shown['nv_inference_pending_request_count{model="m",version="1"}'] == "11"
    assert shown['nv_inference_pending_request_count{model="n",version="1"}'] == "0"
    assert shown['penstock_connections{protocol="http"}'] == "3"
    assert shown['penstock_connections{protocol="h2"}'] == "4"
    assert shown["penstock_inflight_bytes"] == "99"
    assert shown["penstock_processes"] == "2"


def test_facts_are_summed_but_for_the_worst_lag_and_the_first_start() -> None:
    reports = [
        Report([], ServerFacts("1", 50.0, ProcessUsage(10, 1.0, 3), loop_lag_s=None)),
        Report([], ServerFacts("1", 40.0, ProcessUsage(20, 2.0, 4), loop_lag_s=0.5, inflight_bytes=7)),
        Report([], ServerFacts("1", 60.0, ProcessUsage(30, 3.0, 5), loop_lag_s=0.25, inflight_bytes=8)),
    ]
    facts = merged(reports).facts
    assert facts == ServerFacts("1", 40.0, ProcessUsage(60, 6.0, 12), 3, 0.5, inflight_bytes=15)


class ManualLoop(asyncio.SelectorEventLoop):
    """An event loop that runs due callbacks when its time is set."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.due: tuple[float, Callable[..., None], tuple[object, ...]] | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Any, *args: Any, **_: Any) -> asyncio.TimerHandle:
        self.due = self.now + delay, callback, args
        return asyncio.TimerHandle(self.now + delay, callback, args, self)

    def wake(self, late_s: float) -> None:
        assert self.due is not None
        moment, callback, args = self.due
        self.now = moment + late_s
        callback(*args)


def test_the_worst_lag_since_it_was_last_asked() -> None:
    with closing(ManualLoop()) as loop:
        lag = LoopLag()
        assert lag.take() is None
        lag.start(loop)
        for late in (0.125, 0.75, 0.0):
            loop.wake(late)
        assert lag.take() == 0.75
        loop.wake(0.25)
        assert lag.take() == 0.25
        assert lag.take() == 0
        lag.stop()


def test_a_real_loop_is_asked_without_end_until_it_is_stopped() -> None:
    async def main() -> int:
        page = MetricsPage(list)
        page.lag.start(asyncio.get_running_loop())
        await asyncio.sleep(0)
        page.lag.stop()
        return (await page.render()).count(b"penstock_event_loop_lag_seconds 0")

    assert asyncio.run(main()) == 1


def test_the_event_loop_goes_on_between_the_families_of_a_page() -> None:
    async def main() -> tuple[int, int]:
        page = MetricsPage(lambda: [ModelStatistics("m", "1")])
        work, turns = asyncio.ensure_future(page.render()), 0
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        return turns, (await work).count(b"# TYPE")

    turns, families = asyncio.run(main())
    assert turns > families > 20
