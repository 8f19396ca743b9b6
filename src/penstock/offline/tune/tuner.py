"""Tuner: measures the candidates on this machine and chooses one that meets the contract.

::

    screen ─ accuracy ─ finalists ─ confirm ─ choose ─ profile by batch
     │          │                  (few, more loads)
    failed    rejected

Each candidate is timed in a pair with the original, with the same number of threads and nothing else loaded. So the timings of a
pair do not depend on other candidates. Candidates of equal structure have equal speed, so one of them is screened, and then the one
that loses least competes. All versions are screened with the fewest threads. Only the best versions are screened with more threads.
Speeds are measured and never estimated: a candidate beats the original only if the lower bound of its speed-up is above 1. A
candidate that changes the arithmetic must also beat the best exact candidate, and is timed in a pair with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

import msgspec

from penstock.bundle.evidence import Accuracy, CandidateRecord, SizeGain
from penstock.bundle.titles import described
from penstock.dataset import SizedCall
from penstock.engines.base import LoadedModel
from penstock.errors import ContractUnmet, PenstockError
from penstock.measurement import Conditions, Interval, LatencyPoint
from penstock.offline.compress.method import OnProgress
from penstock.offline.deadline import BuildDeadline
from penstock.offline.judge.contract import unmet
from penstock.offline.judge.detect import Choice
from penstock.offline.judge.judge import Judge, size_gains
from penstock.offline.judge.race import Entrant, race_entrants
from penstock.offline.judge.sample_size import too_few
from penstock.offline.sessions import session
from penstock.offline.tune.search import (
    FINALISTS,
    Trial,
    alike,
    choose,
    choose_smallest,
    explain,
    explain_sizes,
    finalists,
    least_harmful,
    record,
)
from penstock.offline.tune.space import Candidate
from penstock.perf.conditions import ConditionsWatch
from penstock.perf.measure import FEWEST_LOADS, LOADS, Timings, speedup
from penstock.perf.profile import BATCHES, knee, profile
from penstock.rows.proof import unproven

_log = logging.getLogger(__name__)

_SCREEN_SHARE, _CONFIRM_SHARE, _PROFILE_SHARE = 0.4, 0.35, 0.25
_SPARE_SHARE = 0.5
"""Share of the time left in the build's budget that confirming may take, even beyond ``_CONFIRM_SHARE``. This narrows intervals."""
_SCREEN_LOADS = 4
"""Loads of each pair in the screening; few, so that it is quick, which makes the intervals wide."""
_WIDEN_END, _SCREEN_END, _JUDGE_END = 0.55, 0.9, 0.75
"""Shares of the build's budget after which nothing is screened with more than the fewest threads, after which no further inexact
structure is screened, and after which only what may win is judged."""
_LATE_FINALISTS = 2
"""Number of finalists after ``_JUDGE_END``."""
_PROFILED_BYTES = 16 << 20
"""Maximum size of the inputs of a profiled call."""

Race = Callable[[Mapping[str, Entrant], Sequence[SizedCall], float, int], Mapping[str, Timings]]


class TuningLimits(msgspec.Struct, frozen=True):
    """Bounds and goal of a tuning run."""

    budget_s: float = 20.0
    """Maximum seconds for timing, without the first three loads of each pair and without the measurement of accuracy."""
    rows: int = 1
    """Samples in a timed call."""
    smallest: bool = False
    """Choose the smallest candidate that meets the contract, instead of the fastest."""
    deadline: BuildDeadline = msgspec.field(default_factory=BuildDeadline)
    """The end of the whole build."""


class TuneResult(msgspec.Struct, frozen=True):
    """The chosen candidate, and the measurements of all candidates."""

    chosen: Candidate
    baseline: CandidateRecord
    records: tuple[CandidateRecord, ...]
    latency: tuple[LatencyPoint, ...]
    """Profile of the chosen candidate by batch size."""
    baseline_latency: tuple[LatencyPoint, ...]
    max_batch: int
    rows_per_call: int
    conditions: Conditions
    choice: Choice
    """The metric of accuracy, and why it was chosen."""
    notes: tuple[str, ...] = ()
    """Remarks on the data."""
    by_size: tuple[SizeGain, ...] = ()
    """The gain of the chosen candidate at each size, if the data have samples of several sizes."""


class Tuner:
    """One tuning run. ``originals`` holds the original model once for each number of threads; ``judge`` judges the candidates."""

    def __init__(
        self,
        originals: Sequence[Candidate],
        candidates: Sequence[Candidate],
        judge: Judge,
        limits: TuningLimits,
        on_progress: OnProgress = lambda *_: None,
        race: Race = race_entrants,
    ) -> None:
        self._bases = {original.threads: Trial(original, status="baseline") for original in originals}
        self._trials = [Trial(candidate) for candidate in candidates]
        self._judge = judge.jointly(max(1, len({trial.candidate.numerics for trial in self._trials})))
        self._data, self._contract = judge.data, judge.contract
        self._limits, self._deadline = limits, limits.deadline
        self._calls = self._data.mix(limits.rows)
        self._on_progress = on_progress
        self._race = race
        self._known: dict[tuple[str, str, str], Accuracy] = {}
        self._notes: tuple[str, ...] = ()

    def run(self, cores: int) -> TuneResult:
        """Measure and choose. Raises ContractUnmet if no candidate meets the contract, PenstockError if the original fails."""
        watch = ConditionsWatch(cores)
        bases, contract, smallest = list(self._bases.values()), self._contract, self._limits.smallest
        judge = self._judge
        self._notes = too_few(
            self._data.units,
            judge.metric,
            contract.max_accuracy_loss,
            "evaluation",
            judge.reference.looks,
            prove=contract.prove_accuracy,
        )
        for note in self._notes:
            _log.warning("%s", note)
        for base in bases:
            base.accuracy = judge.baseline.accuracy
        share_s = _SCREEN_SHARE * self._limits.budget_s / max(1, len(self._groups(self._trials)))
        bases[0].pace = 1.0
        for threads in self._bases:
            self._screen_all(threads, share_s)
        last = finalists(self._trials, smallest, _LATE_FINALISTS if self._deadline.is_past(_JUDGE_END) else FINALISTS)
        share_s = self._confirm(last)
        self._reject_slow(last)

        def compare(one: Trial, other: Trial) -> Interval:
            return speedup(*self._duel(one, other, share_s, FEWEST_LOADS if self._deadline.interrupted else LOADS))

        choice = choose_smallest(bases, last, contract) if smallest else choose(bases, last, contract, compare)
        if choice is None:
            raise self._unmet(last)
        (explain_sizes if smallest else explain)(choice, bases, self._trials)
        return self._result(choice, _conditions(watch.finish(), [*bases, *last]))

    def _unmet(self, last: Sequence[Trial]) -> ContractUnmet:
        # The other trials have no confirmed p99, so the message cannot suggest them.
        judged = [trial for trial in self._trials if trial in last or trial.status == "rejected"]
        bases, contract = self._bases.values(), self._contract
        error = unmet(contract, [record(trial, contract) for trial in (*bases, *judged)])
        tried = [record(trial, contract) for trial in (*bases, *self._trials)]
        error.candidates = tuple(map(described, tried))
        return error

    def _result(self, winner: Trial, conditions: Conditions) -> TuneResult:
        contract, base = self._contract, self._bases[winner.candidate.threads]
        self._profile(base, winner)
        base.timings = winner.against or base.timings  # so that both latencies are of the same loads
        others = [trial for trial in (*self._bases.values(), *self._trials) if trial is not base]
        is_merged = self._data.joins and not unproven(winner.candidate.artifact, self._judge.signature)
        gains = size_gains(self._calls, winner.against, winner.timings) if winner.against and winner.timings else ()
        return TuneResult(
            chosen=winner.candidate,
            baseline=record(base, contract),
            records=tuple(record(trial, contract) for trial in others),
            latency=winner.latency,
            baseline_latency=base.latency,
            max_batch=knee(winner.latency, contract.p99_ms).batch if is_merged else 1,
            rows_per_call=self._limits.rows,
            conditions=conditions,
            choice=self._judge.reference.choice,
            notes=(*self._notes, *self._against_more_threads(winner)),
            by_size=gains,
        )

    def _against_more_threads(self, winner: Trial) -> tuple[str, ...]:
        """A note on the speed of ``winner`` beside the original with the most threads, by the ratios that ``explain`` reports."""
        widest = max(self._bases.values(), key=lambda base: base.candidate.threads).candidate.threads
        pace, threads = self._bases[widest].pace, winner.candidate.threads
        if widest <= threads or not pace or not winner.pace:
            return ()
        return (
            f"compared with the original at {widest} threads instead of {threads}, it is {winner.pace / pace:.2f}x as fast",
        )

    def _groups(self, trials: Sequence[Trial]) -> list[list[Trial]]:
        """``trials`` in groups of equal speed; alone if size matters, since trials of a group can differ in size."""
        return [[trial] for trial in trials] if self._limits.smallest else alike(trials)

    def _promising(self, threads: int) -> list[Trial]:
        """The trials with ``threads`` threads that are timed: all trials for the smallest number of threads, otherwise those of the
        best versions so far.
        """
        trials = [trial for trial in self._trials if trial.candidate.threads == threads]
        if threads == min(self._bases) or len(trials) <= FINALISTS:
            return trials
        best = {trial.candidate.numerics for trial in finalists(self._trials, self._limits.smallest)}
        for trial in trials:
            numerics = trial.candidate.numerics
            if numerics not in best:
                trial.accuracy = self._known.get(numerics)
                trial.reason = "not timed: others were faster with fewer threads"
                self._apply_contract(trial)
        return [trial for trial in trials if trial.candidate.numerics in best]

    def _screen_all(self, threads: int, budget_s: float) -> None:
        """Time and judge the promising trials with ``threads`` threads."""
        groups = self._groups(self._promising(threads))
        if threads > min(self._bases):
            if self._deadline.is_past(_WIDEN_END):
                for trial in (self._bases[threads], *(trial for group in groups for trial in group)):
                    trial.reason = f"not timed: {self._deadline.why_late}"
                return
            self._pace([self._bases[threads]], budget_s, _SCREEN_LOADS)
        # Exact candidates first: they are always timed.
        groups.sort(key=lambda group: not group[0].candidate.exact)
        for number, group in enumerate(groups):
            self._on_progress("screen", number, len(groups))
            self._screen(group, budget_s)
        self._judge_all(groups)

    def _screen(self, group: Sequence[Trial], budget_s: float) -> None:
        """Time one trial of ``group``, whose trials have equal speed: the first that does not fail."""
        is_late = self._deadline.interrupted if group[0].candidate.exact else self._deadline.is_past(_SCREEN_END)
        if is_late:
            for trial in group:
                trial.reason = f"not timed: {self._deadline.why_late}"
            return
        for trial in group:
            self._time(trial, budget_s, _SCREEN_LOADS)
            if trial.timings is not None:
                self._deadline.has_result = True
                return

    def _judge_all(self, groups: Sequence[Sequence[Trial]]) -> None:
        """Measure the accuracy of the trials in ``groups``, the fastest group first. Late in the budget, measure only what may win."""
        accepted = 0
        for number, group in enumerate(sorted(groups, key=lambda trials: min(trial.cost for trial in trials))):
            self._on_progress("accuracy", number, len(groups))
            for trial in group:
                if trial.status == "failed" or (trial.timings is None and trial.reason):
                    continue
                if trial.candidate.numerics in self._known or self._is_worth_judging(group, accepted):
                    self._assess(trial)
                else:
                    trial.reason = f"not judged: {self._deadline.why_late}"
            accepted += self._elect(group)
        self._on_progress("accuracy", len(groups), len(groups))

    def _is_worth_judging(self, group: Sequence[Trial], accepted: int) -> bool:
        """Whether there is time to judge another trial of ``group``, after ``accepted`` faster groups met the contract."""
        if self._deadline.is_past():
            return not accepted and least_harmful(group) is None
        if self._deadline.is_past(_JUDGE_END):
            return accepted < FINALISTS and least_harmful(group) is None
        return True

    def _elect(self, group: Sequence[Trial]) -> bool:
        """The trial of ``group`` that loses least takes over the timings of the group. Returns False if there is none."""
        timed = next((trial for trial in group if trial.timings is not None), None)
        best = least_harmful(group)
        if timed is None or best is None:
            return False
        best.timings, best.against, best.speedup, best.pace = timed.timings, timed.against, timed.speedup, timed.pace
        for trial in group:
            if trial is not best and trial.status == "outrun" and trial.accuracy is not None:
                trial.timings = trial.against = trial.speedup = None
                trial.reason = f"the same operators as {best.candidate.name}, which is at least as accurate"
        return True

    def _assess(self, trial: Trial) -> None:
        numerics = trial.candidate.numerics
        if numerics not in self._known:
            try:
                with _loaded(trial) as model:
                    self._known[numerics] = self._judge.assess_loaded(model, trial.candidate.artifact).accuracy
            except PenstockError as error:
                trial.status, trial.reason = "failed", error.message
                return
        trial.accuracy = self._known[numerics]
        self._apply_contract(trial)

    def _apply_contract(self, trial: Trial) -> None:
        objection = self._contract.accuracy_objection(trial.accuracy) if trial.accuracy else ""
        if objection:
            trial.reject(objection)

    def _confirm(self, last: Sequence[Trial]) -> float:
        """Time the finalists again. Returns the seconds for each pair."""
        if self._deadline.interrupted:
            return 0.0
        bases = [base for base in self._bases.values() if base.pace]
        inexact = [trial for trial in last if not trial.candidate.exact]
        total_s = max(_CONFIRM_SHARE * self._limits.budget_s, _SPARE_SHARE * self._deadline.left_s)
        share_s = total_s / max(1, len(bases) - 1 + len(last) + len(inexact))
        self._on_progress("confirm", 0, len(last) + 1)
        for base in bases:
            base.timings = None
        self._pace(bases[1:], share_s, LOADS)
        for number, trial in enumerate(last, 1):
            self._on_progress("confirm", number, len(last) + 1)
            self._time(trial, share_s, LOADS)
        for base in bases:
            if base.timings is None:
                self._duel(base, base, share_s, LOADS)
        self._on_progress("confirm", len(last) + 1, len(last) + 1)
        return share_s

    def _profile(self, base: Trial, winner: Trial) -> None:
        """Profile the winner, and the original with the same number of threads, at each batch size. Their calls are interleaved."""
        pair = {trial.candidate.name: trial for trial in (base, winner)}
        most = self._data.fitting(BATCHES[-1] if self._data.joins else 1, _PROFILED_BYTES)
        with ExitStack() as stack:
            found = profile(
                {name: stack.enter_context(_loaded(trial)) for name, trial in pair.items()},
                self._data.call,
                _PROFILE_SHARE * self._limits.budget_s,
                [rows for rows in BATCHES if rows <= most],
                on_batch=lambda batch: self._on_progress("profile", batch, 64),
            )
        for name, trial in pair.items():
            trial.latency = found[name]

    def _pace(self, bases: Sequence[Trial], budget_s: float, loads: int) -> None:
        """Time the originals ``bases``, each against that with the fewest threads."""
        first = self._bases[min(self._bases)]
        for base in bases:
            base.pace = speedup(*self._duel(first, base, budget_s, loads)).value

    def _time(self, trial: Trial, budget_s: float, loads: int) -> None:
        """Time ``trial`` against the original with as many threads. This replaces its earlier timings."""
        base = self._bases[trial.candidate.threads]
        try:
            trial.against, trial.timings = self._duel(base, trial, budget_s, loads)
        except PenstockError as error:
            trial.status, trial.reason = "failed", error.message
            return
        trial.speedup = speedup(trial.against, trial.timings)
        trial.pace = base.pace * trial.speedup.value

    def _duel(self, one: Trial, other: Trial, budget_s: float, loads: int) -> tuple[Timings, Timings]:
        """The timings of two trials against one another. Those of originals are collected."""
        entrants = {trial.candidate.name: _entrant(trial) for trial in (one, other)}
        found = self._race(entrants, self._calls, budget_s, loads)
        for trial in {id(trial): trial for trial in (one, other) if trial.status == "baseline"}.values():
            more = found[trial.candidate.name]
            trial.timings = trial.timings.joined(more) if trial.timings else more
        return found[one.candidate.name], found[other.candidate.name]

    def _reject_slow(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            objection = self._contract.latency_objection(trial.p99_ms)
            if objection and trial.status == "outrun":
                trial.reject(objection)


def _loaded(trial: Trial) -> AbstractContextManager[LoadedModel]:
    return session(*_entrant(trial))


def _entrant(trial: Trial) -> Entrant:
    candidate = trial.candidate
    return Entrant(candidate.artifact, candidate.engine, candidate.options)


def _conditions(found: Conditions, trials: Sequence[Trial]) -> Conditions:
    """``found``, with what disturbed the timings of ``trials``."""
    busy = next((trial.busy for trial in trials if trial.busy), "")
    return msgspec.structs.replace(found, dirty=True, busy=busy) if busy else found
