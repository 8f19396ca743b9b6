"""Fuzzes the queue of a model version and the forming of batches: any order of arrivals, cancellations, expiries and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from penstock.online.scheduler.batching_config import QueuePolicy, TimeoutAction
from penstock.online.scheduler.forming import Batch, Rules, form
from penstock.online.scheduler.latency_model import LatencyModel
from penstock.online.scheduler.queue import NEVER, Pending, Queue
from tests.fuzz.mutator import Seed
from tests.fuzz.target import Script, Target

_POLICIES = (
    QueuePolicy(),
    QueuePolicy(TimeoutAction.DELAY, 50),
    QueuePolicy(TimeoutAction.REJECT, 20, allow_timeout_override=True),
)
_MOST = 60


class _Model:
    """The queue, and what must be in it."""

    def __init__(self, script: Script) -> None:
        levels = 1 + script.number(3)
        self.queue = Queue([script.choice(_POLICIES) for _ in range(levels)])
        max_rows = 1 + script.number(9)
        preferred = frozenset(size for size in (2, 4) if script.number(2) and size <= max_rows) or frozenset([max_rows])
        delay_ns = script.choice((0, 0, 30_000))
        natural = not delay_ns and preferred == {max_rows}
        self.rules = Rules(max_rows, preferred, max(preferred), delay_ns, natural, merges=bool(script.number(4)))
        self.latency = LatencyModel() if script.number(2) else None
        self.now_ns = 0
        self.waiting: dict[int, Pending] = {}
        self._number = 0

    def step(self, script: Script) -> None:
        match script.number(8):
            case 0 | 1 | 2:
                self.arrive([self._pending(script) for _ in range(1 + script.number(4))])
            case 3 if self.waiting:
                self._leave(list(self.waiting.values())[script.number(len(self.waiting))], cancel=True)
            case 4 | 5:
                self._form()
            case 6:
                self._expire()
            case _:
                self.now_ns += script.choice((0, 1000, 10_000, 60_000, 10_000_000))
                if self.latency is not None:
                    self.latency.observe(1 + script.number(9), 1 + 1000 * script.number(50), self.now_ns)
        self.check()

    def arrive(self, arrived: Sequence[Pending]) -> None:
        for pending in arrived:
            self.queue.levels[pending.lane >> 1].came += 1
        self.queue.extend(arrived)
        self.waiting.update({pending.number: pending for pending in arrived if pending.done is not None})

    def _pending(self, script: Script) -> Pending:
        self._number += 1
        level = script.number(len(self.queue.levels))
        timeout_ns = self.queue.levels[level].policy.timeout_ns(script.number(60)) or NEVER
        timeout_ns = NEVER if timeout_ns == NEVER else self.now_ns + timeout_ns
        deadline_ns = script.choice((NEVER, self.now_ns + 1, self.now_ns + 40_000))
        return Pending(
            cast(Any, None),
            self._number,
            cast(Any, None),
            rows=1 + script.number(4 if script.number(9) else 20),
            key=script.number(2),
            done=(lambda outcome: None) if script.number(9) else None,
            arrived_ns=self.now_ns,
            lane=2 * level,
            timeout_ns=timeout_ns,
            deadline_ns=deadline_ns,
            expires_ns=min(timeout_ns, deadline_ns),
        )

    def _leave(self, pending: Pending, cancel: bool = False) -> None:
        assert self.waiting.pop(pending.number) is pending, "a request leaves that does not wait"
        if cancel:
            assert self.queue.remove(pending)
            assert not self.queue.remove(pending)

    def _form(self) -> None:
        lines = self.queue.lines()
        formed = form(lines, self.now_ns, self.rules, self.latency)
        for pending in formed.late:
            assert pending.deadline_ns < NEVER, "a request without a deadline is late"
            self._leave(pending, cancel=True)
        if isinstance(formed, Batch):
            requests = formed.requests
            assert requests
            assert formed.rows == sum(pending.rows for pending in requests)
            assert formed.rows <= self.rules.max_rows or len(requests) == 1, "the batch is too large"
            assert len({pending.key for pending in requests}) == 1, "requests are merged that differ"
            order = [(pending.lane, pending.number) for pending in requests]
            assert order == sorted(order), "requests overtake one another"
            for pending in requests:
                self._leave(pending)
            self.queue.take(requests, formed.rows)
        elif not formed.late:
            assert not self.waiting or (self.rules.delay_ns and formed.until_ns > self.now_ns), "a batch never leaves"

    def _expire(self) -> None:
        for pending in self.queue.expire(self.now_ns):
            assert min(pending.deadline_ns, pending.timeout_ns) <= self.now_ns, "a request expires too early"
            self._leave(pending)
        assert self.queue.next_ns > self.now_ns
        for pending in self.waiting.values():
            assert pending.deadline_ns > self.now_ns, "a request waits after its deadline"

    def check(self) -> None:
        found = {pending.number for line in self.queue.lines() for pending in line}
        assert found == set(self.waiting), f"{found} wait instead of {set(self.waiting)}"
        assert len(self.queue) == len(self.waiting)
        assert bool(self.queue) == bool(self.waiting)
        for number, level in enumerate(self.queue.levels):
            own = [pending for pending in self.waiting.values() if pending.lane >> 1 == number]
            assert (level.waiting, level.rows) == (len(own), sum(pending.rows for pending in own))
        assert len(self.queue._moments) <= 2 * len(self.waiting) + 200, "expiry times are left behind"

    def end(self) -> None:
        """Everything that waits leaves in batches once the time has come."""
        for _ in range(len(self.waiting) + 1):
            self.now_ns += 10_000_000
            self._expire()
            self._form()
        assert not self.waiting
        self.check()


class QueueTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (b"\x00\x03", b"\x04", b"\x06", b"\x07\x03")

    def __init__(self) -> None:
        self.seeds: Sequence[Seed] = [
            tuple(bytes((start, n, 7 * n % 11, n)) for n in range(30)) for start in range(6)
        ] + [tuple(bytes((n * n % 251,)) for n in range(start, start + 90)) for start in range(0, 90, 9)]

    def run(self, data: bytes) -> None:
        script = Script(data[:2000])
        model = _Model(script)
        while not script.is_over and len(model.waiting) < _MOST:
            model.step(script)
        model.end()
