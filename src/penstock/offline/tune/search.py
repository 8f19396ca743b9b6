"""Which candidates go on to the next stage, and which one wins. Pure decisions over measured trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.bundle.evidence import Accuracy, CandidateRecord, Interval, LatencyPoint, Status
from penstock.engines.base import LoadedModel
from penstock.offline.tune.contract import Contract, is_faster
from penstock.offline.tune.space import Candidate
from penstock.perf.measure import Timings
from penstock.perf.profile import knee, rows_per_second

FINALISTS = 4
"""Candidates that are measured a second time, for longer; the best exact one is always among them."""

CLOSE_CALL = 1.05
"""Within this ratio of the quickest, the candidate with fewer threads wins: it leaves cores to other instances."""

Compare = Callable[["Trial", "Trial"], Interval]
"""How many times faster the second trial is than the first."""


class Trial(msgspec.Struct, eq=False):
    """A candidate on its way through the tuner, and what is known of it so far."""

    candidate: Candidate
    model: LoadedModel | None = None
    accuracy: Accuracy | None = None
    timings: Timings | None = None
    speedup: Interval | None = None
    status: Status = "outrun"
    reason: str = ""
    latency: tuple[LatencyPoint, ...] = ()

    @property
    def p50_ms(self) -> float:
        return self.timings.p50_ms if self.timings else float("inf")

    @property
    def p99_ms(self) -> float:
        return self.timings.p99_ms if self.timings else float("inf")

    def reject(self, reason: str) -> None:
        self.status, self.reason = "rejected", reason


def running(trials: Sequence[Trial]) -> list[Trial]:
    """Those that nothing speaks against yet."""
    return [trial for trial in trials if trial.status == "outrun" and trial.timings is not None]


def finalists(trials: Sequence[Trial]) -> list[Trial]:
    """The quickest few of the running, and the quickest exact one.

    The p99 is judged only on them: the tail of a short screening says more about the neighbours than about the model.
    """
    ranked = sorted(running(trials), key=lambda trial: trial.p50_ms)
    chosen = ranked[:FINALISTS]
    exact = next((trial for trial in ranked if trial.candidate.exact), None)
    if exact is not None and exact not in chosen:
        chosen.append(exact)
    return chosen


def choose(base: Trial, trials: Sequence[Trial], contract: Contract, compare: Compare) -> Trial | None:
    """The winner, ``base`` itself if nothing is provably faster, or None if not even that meets the contract.

    1. Exact candidates must beat the original.
    2. Inexact ones must beat the original and the quickest exact one.
    3. Among those that did, the quickest; in a close call the one with fewer threads, then the more accurate one.
    4. If the original misses the latency that is asked for, the quickest exact one that meets it, proof or not.
    """
    ranked = sorted(running(trials), key=lambda trial: trial.p50_ms)
    best_exact = next((trial for trial in ranked if trial.candidate.exact), None)
    proven = [
        trial
        for trial in ranked
        if _beats(trial, base)  # 1
        and (trial.candidate.exact or best_exact is None or is_faster(compare(best_exact, trial)))  # 2
    ]
    if proven:
        close = [trial for trial in proven if trial.p50_ms <= CLOSE_CALL * proven[0].p50_ms]  # 3
        return min(close, key=lambda trial: (trial.candidate.threads, _error(trial), trial.p50_ms))
    if not contract.latency_objection(base.p99_ms):
        return base
    return best_exact  # 4


def explain(winner: Trial, base: Trial, trials: Sequence[Trial]) -> None:
    """Give every trial that lost without being rejected the reason why.

    Speeds are told by way of the original: a trial that was screened out was not timed in the same run as the winner.
    """
    for trial in running(trials):
        if trial is winner or trial.speedup is None:
            continue
        pace = trial.speedup.value / (winner.speedup.value if winner.speedup else 1.0)
        if not is_faster(trial.speedup):
            trial.reason = f"not provably faster than the original: {_times(trial.speedup)}"
        elif winner.candidate.exact and not trial.candidate.exact:
            trial.reason = f"not provably faster than the chosen one, which keeps FP32: {pace:.2f}x its speed"
        elif pace > 1 / CLOSE_CALL:
            fewer = "fewer threads" if trial.candidate.threads > winner.candidate.threads else "a smaller error"
            trial.reason = f"a close call, {pace:.2f}x the chosen one's speed, which has {fewer}"
        else:
            trial.reason = f"{pace:.2f}x the chosen one's speed"
    winner.status = "chosen"
    winner.reason = (
        "nothing was provably faster" if winner is base else f"{_times(winner.speedup)} the original's speed"
    )


def record(trial: Trial, contract: Contract) -> CandidateRecord:
    """What goes into the bundle's evidence."""
    candidate, point = trial.candidate, knee(trial.latency, contract.p99_ms) if trial.latency else None
    return CandidateRecord(
        name=candidate.name,
        engine=candidate.engine,
        precision=candidate.precision,
        threads=candidate.threads,
        status=trial.status,
        reason=trial.reason,
        calibration=candidate.calibration,
        size_bytes=candidate.artifact.size_bytes,
        batch=point.batch if point else 1,
        latency_ms=trial.timings.p50_ms if trial.timings else None,
        p99_ms=trial.timings.p99_ms if trial.timings else None,
        speedup=trial.speedup,
        accuracy=trial.accuracy,
        rows_per_second=rows_per_second(point) if point else None,
    )


def _beats(trial: Trial, base: Trial) -> bool:
    return trial is not base and trial.speedup is not None and is_faster(trial.speedup)


def _error(trial: Trial) -> float:
    return trial.accuracy.relative_error if trial.accuracy else 0.0


def _times(interval: Interval | None) -> str:
    return f"{interval.value:.2f}x ({interval.low:.2f} … {interval.high:.2f})" if interval else "not measured"
