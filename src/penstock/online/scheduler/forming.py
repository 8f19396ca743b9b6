"""Forms the next batch. ``form`` is a pure function of the waiting requests, the time and the configuration.

The rules of preferred sizes and delay are the same as in Triton's dynamic batcher (``GetDynamicBatch`` in
``dynamic_batch_scheduler``). The rules apply whenever an instance is free. Requests that cannot be merged with the first request go
into other batches, and do not end the first request's batch.

Requests that would miss their deadlines in the batch of highest throughput are dropped before that batch runs, although their
deadlines have not passed yet (the early drop of Nexus, Shen et al., SOSP 2019).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

import msgspec

from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.latency_model import LatencyModel
from penstock.online.scheduler.queue import NEVER, Pending
from penstock.telemetry.statistics import Reason

_WAKE_NS = 2_000_000
"""A delayed batch starts this many nanoseconds before the last moment that meets its deadlines, because threads wake late."""


class Batch(msgspec.Struct):
    """Requests to run now as one batch."""

    requests: list[Pending]
    rows: int
    reason: Reason
    taken_ns: int
    late: Sequence[Pending] = ()
    """Requests to drop, because they would miss their deadlines."""


class Wait(msgspec.Struct, frozen=True):
    """There is no batch to run. The instance waits until ``until_ns``, or until another request arrives."""

    until_ns: int = NEVER
    late: Sequence[Pending] = ()
    """Requests to drop, as in ``Batch``."""


_NOTHING = Wait()


class Rules(msgspec.Struct, frozen=True):
    """The rules of a BatchingConfig in a precomputed form."""

    max_rows: int
    preferred: frozenset[int]
    largest_preferred: int
    delay_ns: int
    natural: bool
    """True if there is no delay and no preferred size below the maximum."""
    merges: bool

    @classmethod
    def of(cls, config: BatchingConfig) -> Rules:
        max_rows = config.max_rows
        merges = config.batchable and not config.decoupled
        preferred = frozenset(config.preferred_batch_size if merges else ()) or frozenset([max_rows])
        delay_ns = config.max_queue_delay_microseconds * 1000 if merges else 0
        return cls(max_rows, preferred, max(preferred), delay_ns, not delay_ns and preferred == {max_rows}, merges)


def form(
    lines: Iterable[Collection[Pending]], now_ns: int, rules: Rules, latency: LatencyModel | None = None
) -> Batch | Wait:
    """Form the batch that a free instance runs at ``now_ns``. Pure.

    ``lines`` is the result of ``Queue.lines``. If ``latency`` is given, requests that would miss their deadlines are dropped.
    """
    if rules.natural and latency is None:
        for line in lines:
            return _prefix(line, now_ns, rules.max_rows, rules.merges)
        return _NOTHING
    late: list[Pending] = []
    until_ns = NEVER
    for line in lines:
        max_rows = rules.max_rows
        if latency is not None:
            max_rows, dropped = _shed(line, now_ns, max_rows, latency)
            if dropped:
                late += dropped
                gone = {pending.number for pending in dropped}
                line = [pending for pending in line if pending.number not in gone]  # noqa: PLW2901
                if not line:
                    continue
        if rules.natural:
            formed: Batch | Wait = _prefix(line, now_ns, max_rows, rules.merges)
        else:
            formed = _prefer(line, now_ns, max_rows, rules, latency)
        if isinstance(formed, Batch):
            if late:
                formed.late = late
            return formed
        until_ns = min(until_ns, formed.until_ns)
    return Wait(until_ns, late)


def _prefix(line: Collection[Pending], now_ns: int, max_rows: int, merges: bool) -> Batch:
    """The first requests of the line, as many as fit into one batch. The first request always fits."""
    if len(line) <= max_rows:
        # Usually all requests fit, and a pass without decisions is enough.
        requests = list(line)
        rows = requests[0].rows if len(requests) == 1 else sum([pending.rows for pending in requests])
        if rows <= max_rows:
            return Batch(requests, rows, Reason.IDLE if rows < max_rows else _full(rows, max_rows, merges), now_ns)
    requests, rows = [], 0
    for pending in line:
        total = rows + pending.rows
        if total > max_rows and requests:
            return Batch(requests, rows, _full(rows, max_rows, merges), now_ns)
        requests.append(pending)
        rows = total
    reason = _full(rows, max_rows, merges) if rows >= max_rows else Reason.IDLE
    return Batch(requests, rows, reason, now_ns)


def _full(rows: int, max_rows: int, merges: bool) -> Reason:
    return Reason.FULL if merges and rows <= max_rows else Reason.ALONE


def _prefer(
    line: Collection[Pending], now_ns: int, max_rows: int, rules: Rules, latency: LatencyModel | None
) -> Batch | Wait:
    """Apply Triton's rules of preferred sizes and delay."""
    count = rows = best = best_rows = 0
    oldest = latest = NEVER
    is_full = False
    for pending in line:
        total = rows + pending.rows
        if count:
            if total > rules.largest_preferred and not best:
                best, best_rows = count, rows
            if total > max_rows:
                is_full = True
                break
        count, rows = count + 1, total
        oldest = min(oldest, pending.arrived_ns)
        latest = min(latest, pending.deadline_ns)
        if rows in rules.preferred:
            best, best_rows = count, rows
    until_ns = oldest + rules.delay_ns
    if latency is not None and latest < NEVER:
        took_ns = latency.upper(rows, now_ns)
        # If the duration cannot be predicted, the batch must not wait.
        until_ns = min(until_ns, latest - took_ns - _WAKE_NS if took_ns else now_ns)
    must_leave = rules.delay_ns > 0 and now_ns >= until_ns
    if best and not must_leave:
        reason = Reason.PREFERRED if best_rows in rules.preferred else Reason.FULL
        count, rows = best, best_rows
    elif is_full or rows >= min(rules.largest_preferred, max_rows):
        reason = Reason.FULL
    elif must_leave:
        reason = Reason.DELAY
    elif not rules.delay_ns:
        reason = Reason.IDLE
    else:
        return Wait(until_ns)
    if rows >= max_rows:
        reason = _full(rows, max_rows, rules.merges)
    return Batch(list(islice(line, count)), rows, reason, now_ns)


def _shed(line: Collection[Pending], now_ns: int, max_rows: int, latency: LatencyModel) -> tuple[int, list[Pending]]:
    """Choose the batch size that answers the most requests in time, from ``max_rows``, half of it, a quarter, and so on.

    Returns the size and the requests to drop. If more requests wait than fit into one batch, the best size meets the most deadlines
    per second. Otherwise, the best size answers the most requests in time with this and a second batch.
    """
    window, backlog = 0, False
    for pending in line:
        window += pending.rows
        if backlog := window > max_rows:
            break
    size = min(max_rows, window)
    best_score, best_size, best_late = -1.0, size, list[Pending]()
    while size:
        took_ns = latency.upper(size, now_ns)
        served, late, rest = _in_time(line, size, now_ns, latency, backlog)
        if not late and size == min(max_rows, window):
            return max_rows, []
        score = float(served)
        if backlog:
            score /= max(took_ns, 1)
        else:
            after_ns = now_ns + took_ns + latency.upper(max(1, sum(pending.rows for pending in rest)), now_ns)
            score += sum(pending.deadline_ns >= after_ns for pending in rest)
        if score > best_score:
            best_score, best_size, best_late = score, size, late
        size //= 2
    return best_size, best_late


def _in_time(
    line: Collection[Pending], size: int, now_ns: int, latency: LatencyModel, backlog: bool
) -> tuple[int, list[Pending], list[Pending]]:
    """The number of requests that a batch of ``size`` rows answers in time, the requests that are too late, and the requests that do
    not fit.

    With a backlog, the requests that do not fit are not collected.
    """
    served = rows = 0
    late: list[Pending] = []
    rest: list[Pending] = []
    end_ns = now_ns + latency.upper(size, now_ns)
    for pending in line:
        own_end_ns = end_ns if pending.rows <= size else now_ns + latency.upper(pending.rows, now_ns)
        if pending.deadline_ns < own_end_ns:
            late.append(pending)
        elif rest or (served and rows + pending.rows > size):
            if backlog:
                break
            rest.append(pending)
        else:
            served, rows = served + 1, rows + pending.rows
    return served, late, rest
