"""Planner: composes the methods under one accuracy contract, within a budget of time.

A step starts from a kept model. Its result is kept if, on samples held out from its training data, the loss of accuracy against
the original is within the allowance of its kind (``budget.py``), and if it is provably faster than the model it started from, or
smaller as coded. Every attempt is recorded with the reason. The kept models go to the tuner, which judges them anew on data that
no step has seen.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.evidence import Attempt
from penstock.clock import Clock, SystemClock
from penstock.dataset import Dataset
from penstock.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    InvalidArgument,
    InvalidConfig,
    PenstockError,
    ResourceExhausted,
)
from penstock.offline.compress.method import OnProgress, StepContext
from penstock.offline.compress.planner.budget import Spending
from penstock.offline.compress.planner.gain import StepGain, gain_objection, measure, stored_bytes
from penstock.offline.compress.planner.plan_store import PlanStore
from penstock.offline.compress.planner.route import (
    KeptModel,
    Move,
    Result,
    Stage,
    next_move,
    smoothly,
    stages,
    worthwhile,
)
from penstock.offline.compress.ptq.scheme import integer_scheme, required_isa
from penstock.offline.compress.table import Target
from penstock.offline.compress.taps import Progress
from penstock.offline.compress.training.memory import check_training
from penstock.offline.compress.versions import Version
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import ORIGINAL, Judge
from penstock.offline.judge.sample_size import too_few
from penstock.offline.sessions import signature_of
from penstock.resources import machine_facts
from penstock.version import __version__

_log = logging.getLogger(__name__)

_HELD_OUT = 4
"""One sample in so many is held out."""
_OPTIMISED = "optimised"
"""The name of the model that the plan starts from, where that is not the original itself."""
_BATCH = 32
"""Samples in a batch of training, for the estimate of its memory."""
_VERSIONS = 6
"""Models that the tuner is given."""


class PlanOptions(msgspec.Struct, frozen=True):
    """The goal and the means of a plan."""

    contract: Contract = Contract()
    target: Target = "latency"
    """Be fastest at one call of a single row, or smallest as coded."""
    budget_s: float = 600.0
    """Seconds in which steps begin. A running step may exceed them by half, and by at least 30 s; then it is broken off."""
    epochs: float = 10.0
    """Passes over the data of each recovery."""
    threads: int = 1
    """Threads that steps are timed with, and that training takes."""
    seed: int = 0

    def check(self) -> None:
        """Raises InvalidConfig."""
        if not (self.budget_s > 0 and self.epochs > 0 and self.threads > 0 and 0 <= self.seed < 1 << 31):
            raise InvalidConfig(
                f"a plan cannot have a budget of {self.budget_s:g} s, {self.epochs:g} epochs, {self.threads} threads "
                f"and the seed {self.seed}",
                "give a budget, epochs and threads above zero, and a seed from 0 to 2147483647",
            )


class CompressionPlan(msgspec.Struct, frozen=True):
    """The result of a plan: the versions worth a tuner's time, and every attempt."""

    versions: tuple[Version, ...]
    attempts: tuple[Attempt, ...]
    notes: tuple[str, ...] = ()


def plan(  # noqa: PLR0913 - collaborators are handed in by keyword
    model: Artifact,
    data: Dataset,
    options: PlanOptions,
    *,
    original: Artifact | None = None,
    folder: Path | None = None,
    on_progress: OnProgress = lambda *_: None,
    clock: Clock | None = None,
    route: tuple[Stage, ...] | None = None,
) -> CompressionPlan:
    """Compress ``model``, trained on ``data`` where a step trains, with labels or without; a quarter of the data is held out to
    decide on. ``original`` is the model to judge against if ``model`` was optimised from it.

    With ``folder`` every attempt is kept there, and a plan that was interrupted, or is given more time, goes on from them.
    ``route`` is what to try, by default all that suits the target. Steps that need torch are skipped where it is not installed.
    Raises InvalidConfig; InvalidData if the data do not fit or are too few to hold some out; InvalidArgument for a folder of
    another plan.
    """
    options.check()
    route = stages(options.target) if route is None else route
    clock = clock or SystemClock()
    if folder is not None:
        key = {**known_key(model, data, options), "optimised model": model.digest}
        return _Search(model, original or model, data, options, PlanStore(folder, key), on_progress, clock).run(route)
    with tempfile.TemporaryDirectory(prefix="penstock-plan-") as place:
        store = PlanStore(Path(place), {})
        return _Search(model, original or model, data, options, store, on_progress, clock).run(route)


class _Search:
    def __init__(
        self,
        model: Artifact,
        original: Artifact,
        data: Dataset,
        options: PlanOptions,
        store: PlanStore,
        on_progress: OnProgress,
        clock: Clock,
    ) -> None:
        self._options, self._store, self._on_progress, self._clock = options, store, on_progress, clock
        self._started = clock.now()
        fitted, held = data.split_evenly(_HELD_OUT, signature_of(original).smallest_batch)
        self._judge = Judge(original, held, options.threads)
        samples = 0 if self._judge.metric == "fidelity" else held.count
        self._spending = Spending(options.contract, options.budget_s, samples)
        machine = machine_facts()
        scheme = integer_scheme(machine)
        if options.target == "size":  # runs anywhere, so that the bundle needs no second model
            scheme = msgspec.structs.replace(scheme, reduce_range=True)
        self._requires = required_isa(scheme, machine)
        self._context = StepContext(
            original=original,
            teacher=model,
            fitted=fitted,
            judge=self._judge,
            scheme=scheme,
            check_memory=lambda model: check_training(model, fitted, _BATCH, machine.memory_bytes),
            options={"threads": options.threads, "epochs": options.epochs, "seed": options.seed},
        )
        name = ORIGINAL if model.digest == original.digest else _OPTIMISED
        stored = stored_bytes(model, options.target)
        root = Attempt(name, "", "kept", "", stored_bytes=stored, digest=model.digest)
        self._root = KeptModel(name, model, "fp32", (), root)
        self._found: list[KeptModel] = []
        self._seen: list[Attempt] = []
        self._useless: set[str] = set()
        """Precisions that gain nothing on the original; on smaller models they gain less."""

    def run(self, route: tuple[Stage, ...]) -> CompressionPlan:
        for stage in route:
            self._walk(stage, self._root)
        best = worthwhile(self._found, self._rank, smoothly, _VERSIONS)
        return CompressionPlan(tuple(map(self._version, best)), tuple(self._seen), self._notes())

    def _walk(self, stage: Stage, start: KeptModel) -> None:
        """Take the steps of ``stage`` from ``start``, and the following stages from each model that is kept."""
        done: list[tuple[str, Result]] = []
        scratch = self._store.scratch(f"{start.model.digest} {stage.moves[0].name}")
        is_whole = True
        while (move := next_move(stage, done)) is not None:
            if move.name in self._useless and start is not self._root:
                done.append((move.name, "useless"))
                continue
            taken = self._take(stage, move, start, scratch)
            if taken is None:
                is_whole = False
                break
            result, state, is_final = taken
            is_whole = is_whole and is_final
            done.append((move.name, result))
            if result == "useless" and move.precision:
                self._useless.add(move.name)
            if state is not None:
                self._found.append(state)
                for following in stage.then:
                    self._walk(following, state)
        if is_whole:
            shutil.rmtree(scratch, ignore_errors=True)

    def _take(
        self, stage: Stage, move: Move, parent: KeptModel, scratch: Path
    ) -> tuple[Result, KeptModel | None, bool] | None:
        """One step: from the store if it was made before, else made, measured and judged now; and whether it ran its course.

        None if there is no time to begin it.
        """
        attempt, model, is_final = self._store.find(move.name, parent.model.digest), None, True
        if attempt is None:
            if self._is_over(stage.until):
                share = f"{stage.until:.0%} of " if stage.until < 1 else ""
                reason = f"out of time: {share}the budget of {self._options.budget_s:g} s is spent"
                self._seen.append(Attempt(move.name, parent.name, "skipped", reason))
                return None
            ends: list[bool] = []
            """The answers to the step's ``is_over``; after a yes, the step can achieve more with more time."""

            def is_over() -> bool:
                ends.append(self._is_over(stage.until))
                return ends[-1]

            attempt, model = self._try(move, parent, scratch, is_over)
            if any(ends) and attempt.outcome == "failed":
                attempt = msgspec.structs.replace(attempt, outcome="skipped", reason=f"out of time: {attempt.reason}")
            is_final = attempt.outcome != "skipped" and not any(ends)
            if is_final:
                self._store.add(attempt, parent.model.digest, model if attempt.outcome == "kept" else None)
        self._seen.append(msgspec.structs.replace(attempt, parent=parent.name))
        if attempt.outcome != "kept":
            return self._result(move, attempt), None, is_final
        steps = (*parent.steps, move.name)
        model = model or self._store.model(attempt.digest)
        return "kept", KeptModel("+".join(steps), model, move.precision or parent.precision, steps, attempt), is_final

    def _try(
        self, move: Move, parent: KeptModel, scratch: Path, is_over: Callable[[], bool]
    ) -> tuple[Attempt, Artifact | None]:
        """Take one step. An error ends that step, not the plan."""
        began = self._clock.now()
        attempt = Attempt(move.name, parent.name, "failed", "")
        progress = self._reporter(f"{parent.name} → {move.name}")
        context = msgspec.structs.replace(
            self._context,
            contract=self._spending.allowance(move.kind),
            folder=scratch,
            on_progress=lambda _, done, total: progress(done, total),
            is_over=is_over,
        )
        try:
            model = _made(move, parent.model, context)
            measured = measure(self._judge, parent.model, model, self._options.target)
        except (DeadlineExceeded, EngineUnavailable, ResourceExhausted) as error:
            return msgspec.structs.replace(attempt, outcome="skipped", reason=str(error)), None
        except PenstockError as error:
            reason = error.message
        except Exception as error:  # noqa: BLE001 - a defect in one method
            _log.warning("the step %s failed", move.name, exc_info=True)
            reason = f"internal error: {type(error).__name__}: {str(error)[:200]}"
        else:
            return self._judged(attempt, move, parent, model, measured, self._clock.now() - began), model
        return msgspec.structs.replace(attempt, reason=reason, seconds=self._clock.now() - began), None

    def _judged(
        self, attempt: Attempt, move: Move, parent: KeptModel, model: Artifact, measured: StepGain, seconds: float
    ) -> Attempt:
        objection = self._spending.allowance(move.kind).accuracy_objection(measured.accuracy)
        twin = next((state.name for state in (self._root, *self._found) if state.model.digest == model.digest), "")
        objection = objection or (f"the same model as '{twin}'" if twin else "")
        objection = objection or gain_objection(measured, parent.name, parent.attempt.stored_bytes)
        gain = (
            f"{measured.stored_bytes:,d} bytes as coded"
            if measured.stored_bytes
            else f"{measured.speedup.value:.2f}x the original's speed"
        )
        return msgspec.structs.replace(
            attempt,
            outcome="rejected" if objection else "kept",
            reason=objection or f"{gain}; {self._spending.account(measured.accuracy)}",
            accuracy=measured.accuracy,
            speedup=measured.speedup,
            size_bytes=model.size_bytes,
            stored_bytes=measured.stored_bytes,
            digest=model.digest,
            seconds=seconds,
        )

    def _result(self, move: Move, attempt: Attempt) -> Result:
        if attempt.accuracy is None:
            return "failed"
        return "inaccurate" if self._spending.allowance(move.kind).accuracy_objection(attempt.accuracy) else "useless"

    def _is_over(self, share: float) -> bool:
        return self._spending.is_over(self._clock.now() - self._started, share)

    def _reporter(self, title: str) -> Progress:
        def report(done: int, total: int) -> None:
            self._on_progress(title, done, total)
            if self._spending.is_exceeded(self._clock.now() - self._started):
                raise DeadlineExceeded("broken off: out of time", "give a larger budget and go on")

        self._on_progress(title, 0, 1)
        return report

    def _version(self, state: KeptModel) -> Version:
        return Version(
            state.model,
            state.precision,
            compression="+".join(state.steps),
            requires=self._requires if state.precision == "int8" else (),
            stored_bytes=state.attempt.stored_bytes,
        )

    def _rank(self, state: KeptModel) -> float:
        attempt = state.attempt
        assert attempt.speedup is not None
        return -attempt.speedup.value if self._options.target == "latency" else attempt.stored_bytes

    def _notes(self) -> tuple[str, ...]:
        few = too_few(self._judge.data.count, self._judge.metric, self._options.contract.max_accuracy_loss, "held-out")
        late = sum("out of time" in attempt.reason for attempt in self._seen if attempt.outcome == "skipped")
        want = (f"{late} step(s) of the plan were not tried for want of time: give a larger budget",) if late else ()
        return (f"the plan decided on {self._judge.data.count} samples held out from its training data", *few, *want)


def _made(move: Move, model: Artifact, context: StepContext) -> Artifact:
    is_resumed = context.folder is not None and context.folder.exists()
    try:
        return move.make(model, context)
    except InvalidArgument:
        if not is_resumed or context.folder is None:
            raise
        # Progress that is damaged, or of another version of a library, must not cost the step.
        shutil.rmtree(context.folder, ignore_errors=True)
        return move.make(model, context)


def known_key(model: Artifact, data: Dataset, options: PlanOptions) -> dict[str, str]:
    """Everything that decides the attempts, by name, except the optimised model; the same before and after optimising.

    Another budget is the same plan; another machine is another plan.
    """
    machine = machine_facts()
    asked = {
        name: value for name, value in msgspec.structs.asdict(options).items() if name not in ("contract", "budget_s")
    }
    decisive = {**msgspec.structs.asdict(options.contract), **asked}
    return {
        "version": __version__,
        "model": model.provenance[0].source_digest if model.provenance else model.digest,
        "data set": data.digest,
        "machine": " ".join((machine.cpu, *machine.isa)),
        **{name.replace("_", " "): str(value) for name, value in decisive.items()},
    }
