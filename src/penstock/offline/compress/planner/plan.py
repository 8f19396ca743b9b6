"""Planner: composes the methods under one accuracy contract, within a budget of time.

::

    original ─ structure ─ low rank ─ precision              for latency
    original ─ structure ─ sparsity ─ sharing, precision     for size, each as coded

A step goes on from a model that was kept. It is kept itself if, on samples held out from its training data, the loss of
accuracy against the original is within what its kind of step may have spent (``budget.py``), and if it is provably faster than
the model it came from, or smaller as coded. Everything tried is recorded with the reason. The models kept go to the
tuner, which judges them anew on data that no step has seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock import __version__
from penstock.artifact import Artifact, sha256
from penstock.bundle.coded import encode
from penstock.bundle.evidence import Accuracy, Attempt, Interval
from penstock.clock import Clock, SystemClock
from penstock.engines.registry import get_engine
from penstock.errors import EngineUnavailable, InvalidConfig, PenstockError
from penstock.offline.compress.planner.budget import Spending
from penstock.offline.compress.planner.ledger import Ledger
from penstock.offline.compress.planner.moves import Move, Stage, State, Target, Workshop, int8_scheme, stages
from penstock.offline.compress.ptq.scheme import required_isa
from penstock.offline.dataset import Dataset
from penstock.offline.tune.accuracy import Judge, answers, make_judge
from penstock.offline.tune.contract import Contract, is_faster
from penstock.offline.tune.space import Version
from penstock.perf.measure import feed, interleave, repeat_rows, speedup
from penstock.resources import MachineFacts, machine_facts

OnProgress = Callable[[str, int, int], None]

_log = logging.getLogger(__name__)

_HELD_OUT = 0.25
_TIMING_S = 1.5
_VERSIONS = 6
"""Models that the tuner is given, the best on the held-out samples."""
_SMALLER = 0.99
"""A step for size must save a hundredth, or it is not worth its name."""


class PlanOptions(msgspec.Struct, frozen=True):
    """What a plan is for."""

    contract: Contract = Contract()
    target: Target = "latency"
    """Be fastest at one call of a single row, or smallest as coded."""
    budget_s: float = 600.0
    """Seconds to spend; a step that has begun is finished."""
    epochs: float = 10.0
    """Passes over the data of each recovery."""
    threads: int = 1
    """Threads that steps are timed with, and that training takes."""
    seed: int = 0

    def check(self) -> None:
        """Raises InvalidConfig."""
        if not (self.budget_s > 0 and self.epochs > 0 and self.threads > 0):
            raise InvalidConfig("budget, epochs and threads must be above zero")


class Plan(msgspec.Struct, frozen=True):
    """What came of a plan: the versions worth a tuner's time, and all that was tried."""

    versions: tuple[Version, ...]
    attempts: tuple[Attempt, ...]
    notes: tuple[str, ...] = ()


def plan(
    original: Artifact,
    data: Dataset,
    options: PlanOptions,
    *,
    folder: Path | None = None,
    on_progress: OnProgress = lambda *_: None,
    clock: Clock | None = None,
) -> Plan:
    """Compress ``original``, trained on ``data`` where a step trains, labels or none; a quarter of it is held out to decide on.

    With ``folder`` every attempt is kept there, and a plan that was interrupted, or is given more time, goes on from them.
    Steps that need torch are skipped where it is not installed. Raises InvalidConfig, InvalidData, and InvalidArgument for
    a folder of another plan.
    """
    options.check()
    return _Search(original, data, options, folder, on_progress, clock or SystemClock()).run()


class _Search:
    def __init__(
        self,
        original: Artifact,
        data: Dataset,
        options: PlanOptions,
        folder: Path | None,
        on_progress: OnProgress,
        clock: Clock,
    ) -> None:
        self._options, self._on_progress, self._clock = options, on_progress, clock
        self._started = clock.now()
        self._spending = Spending(options.contract, options.budget_s)
        loaded = get_engine("onnxruntime").load(original, {"threads": options.threads})
        fitted, self._held = data.split(_HELD_OUT, loaded.signature.smallest_batch)
        self._judge: Judge = make_judge(answers(loaded, self._held), self._held.labels)
        self._sample = repeat_rows(self._held.inputs, loaded.signature.smallest_batch)
        loaded.unload()
        machine: MachineFacts = machine_facts()
        self._workshop = Workshop(
            original=original,
            fitted=fitted,
            held=self._held,
            machine=machine,
            threads=options.threads,
            epochs=options.epochs,
            seed=options.seed,
            spending=self._spending,
            target=options.target,
        )
        self._requires = required_isa(int8_scheme(self._workshop), machine)
        self._ledger = Ledger(folder, _key(original, data, options))
        self._skipped: list[Attempt] = []
        self._seen: list[Attempt] = []
        self._root = State("original", original, "fp32", (), Attempt("original", "", "kept", ""))

    def run(self) -> Plan:
        found = [self._root]
        every = stages(self._options.target)
        for number, stage in enumerate(every):
            self._on_progress("plan", number, len(every))
            # What later stages go on from: float models whose weights are their own.
            for start in [state for state in found if state.precision == "fp32" and not _is_shared(state)]:
                found += self._walk(stage, start)
        self._on_progress("plan", len(every), len(every))
        best = sorted(found[1:], key=self._rank)[:_VERSIONS]
        versions = tuple(self._version(state) for state in best)
        return Plan(versions, (*self._seen, *self._skipped), self._notes())

    def _walk(self, stage: Stage, start: State) -> list[State]:
        """The models kept of one stage's steps from ``start``."""
        kept: list[State] = []
        for move in stage.moves:
            made = self._take(move, kept[-1] if kept and stage.order == "climb" else start)
            if made is not None:
                kept.append(made)
            if (made is None) == (stage.order != "first"):
                break
        return kept

    def _take(self, move: Move, parent: State) -> State | None:
        """One step: from the ledger if it was made before, else made, measured and judged now. None if it was not kept."""
        attempt = self._ledger.find(move.name, parent.name)
        if attempt is None:
            if self._spending.is_over(self._clock.now() - self._started):
                reason = f"out of time: the budget of {self._options.budget_s:g} s is spent"
                self._skipped.append(Attempt(move.name, parent.name, "skipped", reason))
                return None
            attempt, model = self._try(move, parent)
            self._ledger.add(attempt, model)
        self._seen.append(attempt)
        if attempt.outcome != "kept":
            return None
        steps = (*parent.steps, move.name)
        return State("+".join(steps), self._ledger.model(attempt), move.precision or parent.precision, steps, attempt)

    def _try(self, move: Move, parent: State) -> tuple[Attempt, Artifact | None]:
        self._on_progress(f"{parent.name} → {move.name}", 0, 1)
        began = self._clock.now()
        attempt = Attempt(move.name, parent.name, "failed", "")
        try:
            model = move.make(self._workshop, parent)
            accuracy, against_original, against_parent = self._measure(parent, model)
        except EngineUnavailable as error:
            return msgspec.structs.replace(attempt, outcome="skipped", reason=f"{error.message}; {error.hint}"), None
        except PenstockError as error:
            return msgspec.structs.replace(attempt, reason=error.message, seconds=self._clock.now() - began), None
        stored = len(encode(model.data)) if self._options.target == "size" else 0
        reason = self._spending.allowance(move.kind).accuracy_objection(accuracy)
        reason = reason or self._gain_objection(parent, against_parent, stored)
        attempt = msgspec.structs.replace(
            attempt,
            outcome="rejected" if reason else "kept",
            reason=reason or _praise(self._options.target, against_original, stored),
            accuracy=accuracy,
            speedup=against_original,
            size_bytes=model.size_bytes,
            stored_bytes=stored,
            digest=model.digest,
            seconds=self._clock.now() - began,
        )
        return attempt, model

    def _measure(self, parent: State, model: Artifact) -> tuple[Accuracy, Interval, Interval]:
        """Accuracy against the original, and how many times faster than it and than the parent."""
        engine, options = get_engine("onnxruntime"), {"threads": self._options.threads}
        loaded = {
            name: engine.load(artifact, options)
            for name, artifact in (("original", self._workshop.original), ("parent", parent.model), ("made", model))
        }
        accuracy = self._judge.compare(answers(loaded["made"], self._held))
        timings = interleave({name: feed(one, self._sample) for name, one in loaded.items()}, _TIMING_S)
        return (
            accuracy,
            speedup(timings["original"], timings["made"]),
            speedup(timings["parent"], timings["made"]),
        )

    def _gain_objection(self, parent: State, against_parent: Interval, stored: int) -> str:
        if self._options.target == "latency":
            if is_faster(against_parent):
                return ""
            return f"not provably faster than '{parent.name}': {against_parent.value:.2f}x"
        before = parent.attempt.stored_bytes or len(encode(parent.model.data))
        if stored <= _SMALLER * before:
            return ""
        return f"{stored:,d} bytes as coded, '{parent.name}' has {before:,d}"

    def _version(self, state: State) -> Version:
        return Version(
            state.model,
            state.precision,
            compression="+".join(state.steps),
            requires=self._requires if state.precision == "int8" else (),
            stored_bytes=state.attempt.stored_bytes,
        )

    def _rank(self, state: State) -> float:
        """Least is best."""
        attempt = state.attempt
        assert attempt.speedup is not None
        return -attempt.speedup.value if self._options.target == "latency" else attempt.stored_bytes

    def _notes(self) -> tuple[str, ...]:
        notes = [f"the plan decided on {self._held.count} samples held out from its training data"]
        if self._skipped:
            notes.append(
                f"{len(self._skipped)} step(s) were not tried for want of time: give a larger budget and go on"
            )
        return tuple(notes)


def _is_shared(state: State) -> bool:
    return any(name.startswith("share") for name in state.steps)


def _praise(target: Target, against_original: Interval, stored: int) -> str:
    return (
        f"{against_original.value:.2f}x the original's speed" if target == "latency" else f"{stored:,d} bytes as coded"
    )


def _key(original: Artifact, data: Dataset, options: PlanOptions) -> str:
    """All that decides what the attempts are; more time is not another plan."""
    decisive = msgspec.structs.replace(options, budget_s=0.0)
    parts = (__version__, original.digest, data.digest, msgspec.json.encode(decisive).decode())
    return sha256("\n".join(parts).encode())
