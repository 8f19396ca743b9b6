"""Choose the finalists and the winner among measured trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from penstock.bundle.evidence import Accuracy, CandidateRecord, Status
from penstock.measurement import Interval, LatencyPoint, times
from penstock.offline.judge.contract import Contract, is_faster, unproven_speed, while_busy
from penstock.offline.optimize.structure import structure
from penstock.offline.tune.space import Candidate
from penstock.perf.measure import Timings
from penstock.perf.profile import knee, rows_per_second

FINALISTS = 4
"""Number of candidates that are measured a second time, for longer. The best exact candidates are measured in addition."""

CLOSE_CALL = 1.05
"""If several candidates are within this ratio of the lowest cost, it is a close call. The fewest threads win, then independent rows,
because they allow the server to merge requests."""

SAME_SPEED = 1.02
"""Among the winners of a close call, candidates within this ratio of the lowest cost count as equally fast. The least loss wins, then
the least error."""

CLOSE_SIZE = 1.01
"""Among candidates within this ratio of the smallest size, the fastest wins."""

Compare = Callable[["Trial", "Trial"], Interval]
"""Returns the speed-up of the second trial over the first."""


class Trial(msgspec.Struct, eq=False):
    """A candidate with its measurements so far."""

    candidate: Candidate
    accuracy: Accuracy | None = None
    timings: Timings | None = None
    against: Timings | None = None
    """Timings of the original in the same loads."""
    speedup: Interval | None = None
    """Speed-up over the original with the same number of threads."""
    pace: float = 0.0
    """Speed relative to the original with the fewest threads: the product of two measured speed-ups. Only used to rank trials."""
    status: Status = "outrun"
    reason: str = ""
    latency: tuple[LatencyPoint, ...] = ()

    @property
    def p99_ms(self) -> float:
        return self.timings.p99_ms if self.timings else float("inf")

    @property
    def cost(self) -> float:
        """Latency relative to the original, times the square root of the number of threads. The candidate with the lowest cost wins.

        With twice the threads, a call must be 1.4 times as fast. If not, more instances with fewer threads serve more requests.
        """
        return math.sqrt(self.candidate.threads) / self.pace if self.pace else math.inf

    @property
    def busy(self) -> str:
        """Other processes that disturbed the timings, as text; empty if there were none."""
        return self.timings.busy if self.timings else ""

    def reject(self, reason: str) -> None:
        self.status, self.reason = "rejected", reason


def alike(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Groups of trials of equal speed: the same structure, precision and number of threads in the same engine. Order is kept."""
    groups: dict[tuple[str, str, int, str], list[Trial]] = {}
    for trial in trials:
        one = trial.candidate
        groups.setdefault((one.engine, one.precision, one.threads, structure(one.artifact)), []).append(trial)
    return list(groups.values())


def least_harmful(trials: Sequence[Trial]) -> Trial | None:
    """The judged trial that meets the contract with the least loss, then the least error; None if there is none."""
    judged = [trial for trial in trials if trial.status == "outrun" and trial.accuracy is not None]
    return min(judged, key=_harm, default=None)


def running(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that were timed and judged, did not fail and were not rejected."""
    return [trial for trial in trials if trial.status == "outrun" and trial.timings and trial.accuracy]


def finalists(trials: Sequence[Trial], smallest: bool = False, most: int = FINALISTS) -> list[Trial]:
    """At most ``most`` running trials, of the lowest cost (with ``smallest``: size), and the fastest exact trial for each of their
    thread counts.

    Only finalists are checked against the p99 limit: in the short screening, p99 depends more on other load than on the model.
    """
    ranked = sorted(running(trials), key=lambda trial: (_disk_bytes(trial) if smallest else 0, trial.cost))
    chosen = ranked[:most]
    for threads in sorted({trial.candidate.threads for trial in chosen}):
        exact = _quickest_exact(ranked, threads)
        if exact is not None and exact not in chosen:
            chosen.append(exact)
    return chosen


def choose(bases: Sequence[Trial], trials: Sequence[Trial], contract: Contract, compare: Compare) -> Trial | None:
    """The winner, or None if no trial meets the contract. ``bases`` are the trials of the original, one per thread count.

    1. An exact candidate must beat the original with the same number of threads.
    2. An inexact candidate must beat the original and the fastest exact candidate with the same number of threads.
    3. Among candidates that meet rule 1 or 2, and originals that were not beaten, the lowest cost wins.
       In a close call, the fewest threads win, then independent rows, then the best accuracy.
    4. A winner must also beat the cheapest candidate with fewer threads in a pair. Otherwise, candidates with as many threads lose.
    5. If no candidate of rule 3 meets the required latency, the fastest exact candidate within the required latency wins.
    """
    alive = running(trials)
    proven = [trial for trial in alive if _is_proven(trial, alive, compare)]  # 1, 2
    beaten = {trial.candidate.threads for trial in proven}
    unbeaten = [base for base in bases if base.pace and base.candidate.threads not in beaten]
    field = proven + [base for base in unbeaten if not contract.latency_objection(base.p99_ms)]
    while winner := _cheapest(field):  # 3
        rival = _cheapest([trial for trial in field if trial.candidate.threads < winner.candidate.threads])
        if rival is None or _is_worth_its_threads(rival, winner, compare):  # 4
            return winner
        field = [trial for trial in field if trial.candidate.threads != winner.candidate.threads]
    return max((trial for trial in alive if trial.candidate.exact), key=lambda trial: trial.pace, default=None)  # 5


def _cheapest(field: Sequence[Trial]) -> Trial | None:
    """The trial with the lowest cost. In a close call, the fewest threads win, then independent rows, then the best accuracy."""
    if not field:
        return None
    least = min(trial.cost for trial in field)
    close = [trial for trial in field if trial.cost <= CLOSE_CALL * least]
    frugal = _least(close, lambda trial: (trial.candidate.threads, trial.candidate.mixes_rows))
    least = min(trial.cost for trial in frugal)
    return min((trial for trial in frugal if trial.cost <= SAME_SPEED * least), key=_harm)


def _is_worth_its_threads(rival: Trial, trial: Trial, compare: Compare) -> bool:
    """True if ``trial`` is proven to have a lower cost than ``rival``, which has fewer threads."""
    return compare(rival, trial).low > math.sqrt(trial.candidate.threads / rival.candidate.threads)


def choose_smallest(bases: Sequence[Trial], trials: Sequence[Trial], contract: Contract) -> Trial | None:
    """The smallest trial on disk. Among trials of nearly equal size, the lowest cost wins. None if no trial meets the contract."""
    field = [trial for trial in (*running(trials), *bases) if not contract.latency_objection(trial.p99_ms)]
    least = min((_disk_bytes(trial) for trial in field), default=0)
    close = [trial for trial in field if _disk_bytes(trial) <= CLOSE_SIZE * least]
    return min(close, key=lambda trial: trial.cost, default=None)


def explain_sizes(winner: Trial, bases: Sequence[Trial], trials: Sequence[Trial]) -> None:
    """After a choice by size, record why each trial won or lost."""
    least = _disk_bytes(winner)
    for trial in (*bases, *running(trials)):
        larger = _disk_bytes(trial) / least
        trial.reason = (
            f"{larger:.2f}x the size of the chosen candidate" if larger > CLOSE_SIZE else "of the same size but slower"
        )
    winner.status = "chosen"
    winner.reason = f"{least:,d} bytes, {_disk_bytes(bases[0]) / least:.2f}x smaller than the original"
    if not winner.candidate.exact and winner.speedup is not None and not is_faster(winner.speedup):
        winner.reason += f", but not provably faster on this machine: {_times(winner.speedup)}{while_busy(winner.busy)}"


def explain(winner: Trial, bases: Sequence[Trial], trials: Sequence[Trial]) -> None:
    """Record why each trial that was not rejected won or lost."""
    for trial in (*bases, *running(trials)):
        if trial is winner or not trial.pace:
            continue
        share = trial.pace / winner.pace if winner.pace else 0.0
        if trial in bases:
            trial.reason = f"the original, unmodified: {share:.2f}x the chosen one's speed"
            if share > 1 and trial.candidate.threads > winner.candidate.threads:
                trial.reason += f", too little for {trial.candidate.threads} threads"
        elif trial.speedup is None or not is_faster(trial.speedup):
            trial.reason = f"{unproven_speed('the original', trial.speedup, trial.busy)}: {_times(trial.speedup)}"
            continue
        elif share > 1 and trial.candidate.threads > winner.candidate.threads:
            trial.reason = f"{share:.2f}x the chosen one's speed, too little for {trial.candidate.threads} threads"
        elif share > 1 / CLOSE_CALL:
            trial.reason = f"a close call, {share:.2f}x the chosen one's speed"
        else:
            trial.reason = f"{share:.2f}x the chosen one's speed"
        trial.reason += while_busy(trial.busy)
    winner.status = "chosen"
    winner.reason = (
        f"the original: {_nothing(winner, trials)}"
        if winner in bases
        else f"{_times(winner.speedup)} the original's speed{while_busy(winner.busy)}"
    )


def record(trial: Trial, contract: Contract) -> CandidateRecord:
    """The record of ``trial`` for the bundle's evidence."""
    candidate, point = trial.candidate, knee(trial.latency, contract.p99_ms) if trial.latency else None
    return CandidateRecord(
        name=candidate.name,
        engine=candidate.engine,
        precision=candidate.precision,
        threads=candidate.threads,
        status=trial.status,
        reason=trial.reason,
        calibration=candidate.calibration,
        compression=candidate.compression,
        size_bytes=candidate.artifact.size_bytes,
        stored_bytes=candidate.stored_bytes,
        batch=point.batch if point else 1,
        latency_ms=trial.timings.p50_ms if trial.timings else None,
        p99_ms=trial.timings.p99_ms if trial.timings else None,
        calls=trial.timings.calls if trial.timings else 0,
        speedup=trial.speedup,
        accuracy=trial.accuracy,
        rows_per_second=rows_per_second(point) if point else None,
        busy=trial.busy,
    )


def _is_proven(trial: Trial, alive: Sequence[Trial], compare: Compare) -> bool:
    if trial.speedup is None or not is_faster(trial.speedup):
        return False
    exact = _quickest_exact(alive, trial.candidate.threads)
    return trial.candidate.exact or exact is None or is_faster(compare(exact, trial))


def _quickest_exact(trials: Sequence[Trial], threads: int) -> Trial | None:
    same = [trial for trial in trials if trial.candidate.exact and trial.candidate.threads == threads]
    return max(same, key=lambda trial: trial.pace, default=None)


def _least(trials: Sequence[Trial], key: Callable[[Trial], tuple[int, ...]]) -> list[Trial]:
    """The trials with the lowest ``key``."""
    lowest = min(map(key, trials))
    return [trial for trial in trials if key(trial) == lowest]


def _harm(trial: Trial) -> tuple[float, float, float]:
    """The loss, then the error of the outputs, then the cost."""
    known = trial.accuracy
    return (max(0.0, known.loss.value), known.relative_error, trial.cost) if known else (0.0, 0.0, trial.cost)


def _disk_bytes(trial: Trial) -> int:
    return trial.candidate.disk_bytes


def _times(interval: Interval | None) -> str:
    return times(interval) if interval else "not measured"


def _nothing(winner: Trial, trials: Sequence[Trial]) -> str:
    """Why the original was chosen."""
    busy = next((trial.busy for trial in (*running(trials), winner) if trial.busy), "")
    return f"the machine was too busy to tell if anything is faster ({busy})" if busy else "nothing was provably faster"
