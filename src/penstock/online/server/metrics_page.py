"""The metrics page: the report of one process, and the reports of all processes merged into one page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from penstock.telemetry.exposition import families
from penstock.telemetry.metrics import ServerFacts
from penstock.telemetry.statistics import ModelStatistics, add_numbers, merge
from penstock.telemetry.usage import MachineMeter, process_usage
from penstock.version import __version__

_PERIOD_S = 0.5


class Report(msgspec.Struct):
    """The statistics of one process, in a form that can be sent to other processes."""

    models: list[ModelStatistics]
    facts: ServerFacts


class LoopLag:
    """Measures how late the event loop runs its callbacks, with one callback every half second."""

    def __init__(self) -> None:
        self._worst = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure ``loop`` until ``stop``."""
        self._timer = loop.call_later(_PERIOD_S, self._look, loop, loop.time() + _PERIOD_S)

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()

    def take(self) -> float | None:
        """The event loop's largest delay, in seconds, measured since the previous ``take``; None before ``start``."""
        worst, self._worst = self._worst, 0.0
        return None if self._timer is None else worst

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._worst = max(self._worst, loop.time() - due)
        self.start(loop)


class MetricsPage:
    """Creates the report of one process, and the page of all processes. Used only on the event loop."""

    def __init__(
        self,
        statistics: Callable[[], Iterable[ModelStatistics]],
        connections: Callable[[], Mapping[str, int]] = dict,
        inflight_bytes: Callable[[], int] | None = None,
        dropped_records: Callable[[], int] = int,
    ) -> None:
        """``statistics`` returns the current models' statistics. ``connections`` returns the number of connections by protocol."""
        self._statistics = statistics
        self._connections = connections
        self._inflight_bytes = inflight_bytes
        self._dropped_records = dropped_records
        self.lag = LoopLag()
        """The lag of the event loop. The server starts and stops the measurement."""
        self._machine = MachineMeter()
        self._started_s = time.time()
        self._inherited: list[ModelStatistics] = []

    def inherit(self, statistics: list[ModelStatistics]) -> None:
        """Continue the counters of the process that this process replaces."""
        self._inherited = statistics

    def models(self) -> list[ModelStatistics]:
        """The statistics of every model version, including inherited counters. If none were inherited, returns the live objects."""
        own = list(self._statistics())
        return merge([own, self._inherited]) if self._inherited else own

    def report(self) -> Report:
        """The report of this process."""
        facts = ServerFacts(
            version=__version__,
            started_s=self._started_s,
            process=process_usage(),
            loop_lag_s=self.lag.take(),
            connections=dict(self._connections()),
            inflight_bytes=self._inflight_bytes() if self._inflight_bytes else None,
            dropped_records=self._dropped_records(),
        )
        return Report(self.models(), facts)

    async def render(self, others: Sequence[Report] = (), dead: Sequence[Sequence[ModelStatistics]] = ()) -> bytes:
        """The page for this process, the ``others``, and the counters of ``dead`` processes.

        This coroutine yields to the event loop after each metric family.
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
    """Merge one or more reports. The result has the greatest lag, the earliest start, and the sums of all other values."""
    facts = [report.facts for report in reports]
    total = facts[0]
    for each in facts[1:]:
        total = add_numbers(total, each)
    total.started_s = min(each.started_s for each in facts)
    total.loop_lag_s = max((each.loop_lag_s for each in facts if each.loop_lag_s is not None), default=None)
    return Report(merge(report.models for report in reports), total)
