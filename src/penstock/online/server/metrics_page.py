"""The page of metrics: what one process has to report, and the reports of all processes as one page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from penstock.telemetry.exposition import CONTENT_TYPE, families
from penstock.telemetry.metrics import ServerFacts
from penstock.telemetry.statistics import ModelStatistics, add_numbers, merge
from penstock.telemetry.usage import MachineMeter, process_usage
from penstock.version import __version__

__all__ = ["CONTENT_TYPE", "LoopLag", "MetricsPage", "Report"]

_PERIOD_S = 0.5


class Report(msgspec.Struct):
    """What one process knows; msgspec carries it from process to process."""

    models: list[ModelStatistics]
    facts: ServerFacts


class LoopLag:
    """How late the event loop runs what is due; costs it one callback every half second."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._worst = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._wait()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def take(self) -> float:
        """The worst in seconds since it was last taken."""
        worst, self._worst = self._worst, 0.0
        return worst

    def _wait(self) -> None:
        self._timer = self._loop.call_later(_PERIOD_S, self._look, self._loop.time() + _PERIOD_S)

    def _look(self, due: float) -> None:
        self._worst = max(self._worst, self._loop.time() - due)
        self._wait()


class MetricsPage:
    """Belongs to the event loop of one process."""

    def __init__(
        self,
        statistics: Callable[[], Iterable[ModelStatistics]],
        connections: Callable[[], Mapping[str, int]] = dict,
        inflight_bytes: Callable[[], int] | None = None,
        dropped_records: Callable[[], int] = int,
    ) -> None:
        """``statistics``: of the models that there are now; ``connections``: how many are open, by protocol."""
        self._statistics = statistics
        self._connections = connections
        self._inflight_bytes = inflight_bytes
        self._dropped_records = dropped_records
        self.lag: LoopLag | None = None
        """Set once there is a loop to measure."""
        self._machine = MachineMeter()
        self._started_s = time.time()
        self.inherited: list[ModelStatistics] = []
        """Of a process whose place this one has taken: counters go on from there."""

    def models(self) -> list[ModelStatistics]:
        """Statistics of every model version; those that go on counting, unless some were inherited."""
        own = list(self._statistics())
        return merge([own, self.inherited]) if self.inherited else own

    def report(self) -> Report:
        """What this process has to tell."""
        facts = ServerFacts(
            version=__version__,
            started_s=self._started_s,
            process=process_usage(),
            loop_lag_s=self.lag.take() if self.lag else None,
            connections=dict(self._connections()),
            inflight_bytes=self._inflight_bytes() if self._inflight_bytes else None,
            dropped_records=self._dropped_records(),
        )
        return Report(self.models(), facts)

    async def render(self, others: Sequence[Report] = (), dead: Sequence[Sequence[ModelStatistics]] = ()) -> bytes:
        """The page, with the reports of the other processes added to ours, and what dead ones have counted.

        What else the event loop has to do comes in between.
        """
        own = self.report()
        whole = merged([own, *others]) if others else own
        models = merge([whole.models, *dead]) if dead else whole.models
        page = []
        for lines in families(models, whole.facts, self._machine.read()):
            page.append(lines)
            await asyncio.sleep(0)
        return "".join(page).encode()


def merged(reports: Sequence[Report]) -> Report:
    """All (>= 1) as one: sums, but of the lag the worst, of the start the first."""
    facts = [report.facts for report in reports]
    total = facts[0]
    for each in facts[1:]:
        total = add_numbers(total, each)
    total.started_s = min(each.started_s for each in facts)
    total.loop_lag_s = max((each.loop_lag_s for each in facts if each.loop_lag_s is not None), default=None)
    return Report(merge(report.models for report in reports), total)
