"""Tuner: measures the candidates on this machine and chooses one that meets the contract.

::

    load ─ accuracy ─ screen ─ finalists ─ confirm ─ choose ─ profile by batch
     │        │       (all, interleaved)   (few, interleaved, longer)
    failed  rejected

All versions are screened with the fewest threads. Only the best of them are screened with more threads. Speeds are measured and
never estimated: a candidate beats the original only if the lower bound of its speed-up is above 1. A candidate that changes the
arithmetic must also beat the best exact candidate in this way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from penstock.bundle.evidence import Accuracy, CandidateRecord
from penstock.dataset import Dataset
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import ContractUnmet, PenstockError
from penstock.measurement import Conditions, Interval, LatencyPoint
from penstock.offline.compress.method import OnProgress
from penstock.offline.judge.accuracy import Reference
from penstock.offline.judge.contract import Contract, unmet
from penstock.offline.judge.detect import Choice
from penstock.offline.judge.judge import Judge
from penstock.offline.judge.race import race_loaded
from penstock.offline.judge.sample_size import too_few
from penstock.offline.sessions import session
from penstock.offline.tune.search import (
    FINALISTS,
    Trial,
    choose,
    choose_smallest,
    explain,
    explain_sizes,
    finalists,
    record,
)
from penstock.offline.tune.space import Candidate
from penstock.perf.measure import ConditionsWatch, repeat_rows, speedup
from penstock.perf.profile import knee, profile
from penstock.rows.proof import unproven

_log = logging.getLogger(__name__)

_SCREEN_SHARE, _CONFIRM_SHARE, _PROFILE_SHARE = 0.4, 0.35, 0.25
_SCREEN_PRECISION, _PRECISION = 0.03, 0.01
"""A stage ends early when the speeds are known to this relative precision: coarse for the screening, fine for the final choice."""
_MEMORY_SHARE = 0.5
"""Fraction of the machine's memory for candidates that are loaded together."""


class TuningLimits(msgspec.Struct, frozen=True):
    """Bounds and goal of a tuning run."""

    memory_bytes: int
    """The machine's memory; candidates are timed in groups that fit into half of it."""
    budget_s: float = 20.0
    """Maximum seconds for timing. Loading and measuring accuracy are not included."""
    rows: int = 1
    """Samples in a timed call."""
    smallest: bool = False
    """Choose the smallest candidate under the contract instead of the fastest."""


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
    """The metric of accuracy, and the reason for it."""
    notes: tuple[str, ...] = ()
    """Remarks on the data."""


class Tuner:
    """One tuning run, on ``data`` and under ``contract``. ``originals`` holds the original model, once for each number of threads."""

    def __init__(
        self,
        originals: Sequence[Candidate],
        candidates: Sequence[Candidate],
        data: Dataset,
        contract: Contract,
        limits: TuningLimits,
        on_progress: OnProgress = lambda *_: None,
    ) -> None:
        self._bases = {original.threads: Trial(original, status="baseline") for original in originals}
        self._trials = [Trial(candidate) for candidate in candidates]
        self._data = data
        self._contract = contract
        self._limits = limits
        self._on_progress = on_progress
        self._known: dict[tuple[str, str, str], Accuracy] = {}
        self._notes: tuple[str, ...] = ()

    def run(self, cores: int) -> TuneResult:
        """Measure and choose. Raises ContractUnmet if no candidate meets the contract, PenstockError if the original fails."""
        watch = ConditionsWatch(cores)
        bases, contract, smallest = list(self._bases.values()), self._contract, self._limits.smallest
        looks = max(1, len({trial.candidate.numerics for trial in self._trials}))
        first = bases[0].candidate
        judge = Judge(first.artifact, self._data, first.threads, contract=contract, looks=looks)
        self._notes = too_few(self._data.count, judge.metric, contract.max_accuracy_loss, "evaluation", looks)
        for note in self._notes:
            _log.warning("%s", note)
        with ExitStack() as stack:
            for base in bases:
                base.model, base.accuracy = _load(base, stack), judge.baseline.accuracy
            for threads in self._bases:
                for group in self._groups(self._promising(threads)):
                    self._screen(group, judge)
            last = finalists(self._trials, smallest)
            self._confirm(last, stack)
            self._reject_slow(last)
            choice = choose_smallest(bases, last, contract) if smallest else choose(bases, last, contract, _compare)
            if choice is None:
                raise self._unmet(last)
            (explain_sizes if smallest else explain)(choice, bases, self._trials)
            return self._result(choice, judge.reference, watch)

    def _unmet(self, last: Sequence[Trial]) -> ContractUnmet:
        # The other trials have no confirmed p99, so the message cannot suggest them.
        judged = [trial for trial in self._trials if trial in last or trial.status == "rejected"]
        bases, contract = self._bases.values(), self._contract
        error = unmet(contract, [record(trial, contract) for trial in (*bases, *judged)])
        tried = [record(trial, contract) for trial in (*bases, *self._trials)]
        error.candidates = tuple(msgspec.to_builtins(one) for one in tried)
        return error

    def _result(self, winner: Trial, reference: Reference, watch: ConditionsWatch) -> TuneResult:
        self._profile(winner)
        contract, base = self._contract, self._bases[winner.candidate.threads]
        others = [trial for trial in (*self._bases.values(), *self._trials) if trial is not base]
        is_merged = not unproven(winner.candidate.artifact, _model(winner).signature)
        return TuneResult(
            chosen=winner.candidate,
            baseline=record(base, contract),
            records=tuple(record(trial, contract) for trial in others),
            latency=winner.latency,
            baseline_latency=base.latency,
            max_batch=knee(winner.latency, contract.p99_ms).batch if is_merged else 1,
            rows_per_call=self._limits.rows,
            conditions=watch.finish(),
            choice=reference.choice,
            notes=self._notes,
        )

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
                self._judge(trial)
        return [trial for trial in trials if trial.candidate.numerics in best]

    def _screen(self, group: Sequence[Trial], judge: Judge) -> None:
        """Load a group, measure its accuracy, and time it. Inaccurate trials are timed too, for the report."""
        with ExitStack() as stack:
            for trial in group:
                self._on_progress("accuracy", self._trials.index(trial), len(self._trials))
                try:
                    self._assess(trial, _load(trial, stack), judge)
                except PenstockError as error:
                    trial.status, trial.reason = "failed", error.message
            loaded = [trial for trial in group if trial.model is not None]
            self._on_progress("screen", self._trials.index(group[-1]), len(self._trials))
            self._time(
                loaded, _SCREEN_SHARE * self._limits.budget_s * len(group) / len(self._trials), _SCREEN_PRECISION
            )
            for trial in loaded:
                trial.model = None

    def _assess(self, trial: Trial, model: LoadedModel, judge: Judge) -> None:
        numerics = trial.candidate.numerics
        if numerics not in self._known:
            self._known[numerics] = judge.assess_loaded(model).accuracy
        trial.model, trial.accuracy = model, self._known[numerics]
        self._judge(trial)

    def _judge(self, trial: Trial) -> None:
        objection = self._contract.accuracy_objection(trial.accuracy) if trial.accuracy else ""
        if objection:
            trial.reject(objection)

    def _confirm(self, last: Sequence[Trial], stack: ExitStack) -> None:
        self._on_progress("confirm", 0, 1)
        for trial in last:
            trial.model = _load(trial, stack)
        self._time(last, _CONFIRM_SHARE * self._limits.budget_s, _PRECISION)
        self._on_progress("confirm", 1, 1)

    def _profile(self, winner: Trial) -> None:
        """Profile the winner, and the original with the same number of threads, at each batch size. Their calls are interleaved."""
        pair = {trial.candidate.name: trial for trial in (self._bases[winner.candidate.threads], winner)}
        models = {name: _model(trial) for name, trial in pair.items()}
        found = profile(
            models,
            self._data.inputs,
            _PROFILE_SHARE * self._limits.budget_s,
            on_batch=lambda batch: self._on_progress("profile", batch, 64),
            precision=_SCREEN_PRECISION,
        )
        for name, trial in pair.items():
            trial.latency = found[name]

    def _time(self, trials: Sequence[Trial], budget_s: float, precision: float) -> None:
        """Time ``trials`` and the originals, interleaved. This replaces all timings, because only timings of one run can be
        compared.
        """
        bases = list(self._bases.values())
        timed = {trial.candidate.name: trial for trial in (*bases, *trials)}
        sample = repeat_rows(self._data.inputs, self._limits.rows)
        for name, timings in race_loaded({n: _model(t) for n, t in timed.items()}, sample, budget_s, precision).items():
            timed[name].timings = timings
        for trial in timed.values():
            trial.pace = bases[0].p50_ms / trial.p50_ms
        for trial in trials:
            trial.speedup = _compare(self._bases[trial.candidate.threads], trial)

    def _groups(self, trials: Sequence[Trial]) -> list[list[Trial]]:
        """``trials`` in groups that, by their engines' estimates, fit into memory together with the originals."""
        limit = _MEMORY_SHARE * (self._limits.memory_bytes or float("inf"))
        groups: list[list[Trial]] = []
        originals = used = sum(_memory(base) for base in self._bases.values())
        for trial in trials:
            size = _memory(trial)
            if not groups or used + size > limit:
                groups.append([])
                used = originals
            groups[-1].append(trial)
            used += size
        return groups

    def _reject_slow(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            objection = self._contract.latency_objection(trial.p99_ms)
            if objection and trial.status == "outrun":
                trial.reject(objection)


def _load(trial: Trial, stack: ExitStack) -> LoadedModel:
    candidate = trial.candidate
    return stack.enter_context(session(candidate.artifact, candidate.engine, candidate.options))


def _memory(trial: Trial) -> int:
    candidate = trial.candidate
    return get_engine(candidate.engine).estimate(candidate.artifact, candidate.options).memory_bytes


def _model(trial: Trial) -> LoadedModel:
    assert trial.model is not None
    return trial.model


def _compare(base: Trial, other: Trial) -> Interval:
    assert base.timings is not None
    assert other.timings is not None
    return speedup(base.timings, other.timings)
