"""Planner: combines the methods under one accuracy contract, within a time budget.

A step makes a new model from a kept model, its parent. The new model is kept if it meets two conditions. First, its loss of accuracy
against the original, measured on held-out samples, is within the allowance for the kind of step (``budget.py``). Second, it is
provably faster than its parent or, when optimising for size, smaller as a coded model. Every attempt is recorded with the reason for
its outcome. The tuner judges the kept models again on data that no step has seen.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
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
from penstock.offline.compress.versions.versions import Version
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import ORIGINAL, Judge
from penstock.offline.judge.sample_size import RATES, too_few
from penstock.offline.sessions import signature_of
from penstock.resources import machine_facts
from penstock.version import __version__

_log = logging.getLogger(__name__)

_HELD_OUT = 4
"""One of this many samples is held out from training."""
_OPTIMISED = "optimised"
"""Name of the first model of the plan, if it is not the original itself."""
_BATCH = 32
"""Batch size for the memory estimate of training."""
_VERSIONS = 6
"""Maximum number of models passed to the tuner."""


class PlanOptions(msgspec.Struct, frozen=True):
    """The goal and the resources of a plan."""

    contract: Contract = Contract()
    target: Target = "latency"
    """Minimise the latency of a single row, or the size as a coded model."""
    budget_s: float = 600.0
    """Time limit in seconds for starting steps. A running step may take extra time: half the limit, or 30 s if that is longer."""
    epochs: float = 10.0
    """Passes over the data in each training run."""
    threads: int = 1
    """Threads for timing and training."""
    seed: int = 0

    def check(self) -> None:
        """Raises InvalidConfig."""
        if not (self.budget_s > 0 and self.epochs > 0 and self.threads > 0 and 0 <= self.seed < 1 << 31):
            raise InvalidConfig(
                f"a plan cannot have a budget of {self.budget_s:g} s, {self.epochs:g} epochs, {self.threads} threads "
                f"and the seed {self.seed}",
                "give a budget, epochs and threads above 0, and a seed from 0 to 2147483647",
            )


class CompressionPlan(msgspec.Struct, frozen=True):
    """The result of a plan: the versions to pass to the tuner, and all attempts."""

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
    """Compress ``model`` and judge the results against ``original``, which defaults to ``model``.

    Steps train on three quarters of ``data``, and models are judged on the remaining quarter. Labels are optional. ``folder`` stores
    every attempt. The same plan can thus continue after an interruption or with a larger budget. ``route`` defaults to all steps for
    the target. Without torch, training steps are skipped. Raises InvalidConfig; InvalidData if the data do not fit the model or are
    too few to hold out a quarter; InvalidArgument if ``folder`` holds another plan.
    """
    options.check()
    route = stages(options.target) if route is None else route
    clock = clock or SystemClock()
    key = {**known_key(model, data, options), "optimised model": model.digest, "cut": str(options.contract.cut)}
    with ExitStack() as stack:
        folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-plan-")))
        store = PlanStore(folder, key)
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
        self._judge = Judge(original, held, options.threads, contract=options.contract)
        samples = held.count if self._judge.metric in RATES else 0
        self._spending = Spending(options.contract, options.budget_s, samples)
        machine = machine_facts()
        scheme = integer_scheme(machine)
        if options.target == "size":  # 7-bit weights are exact on any CPU, so the bundle needs no fallback variant
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
        self._root = KeptModel(name, model, "fp32", root)
        self._found: list[KeptModel] = []
        self._seen: list[Attempt] = []
        self._useless: set[str] = set()
        """Precision steps that gained nothing on the original. They are not tried again: they would gain even less on smaller models.
        """

    def run(self, route: tuple[Stage, ...]) -> CompressionPlan:
        for stage in route:
            self._walk(stage, self._root)
        best = worthwhile(self._found, self._rank, smoothly, _VERSIONS)
        return CompressionPlan(tuple(map(self._version, best)), tuple(self._seen), self._notes())

    def _walk(self, stage: Stage, start: KeptModel) -> None:
        """Run the steps of ``stage`` from ``start``, and the following stages from each kept model."""
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
        """The result of one step, its model if it was kept, and True if the step ran to its end. None if the time is used up.

        A step in the store is not repeated.
        """
        attempt, model, is_final = self._store.find(move.name, parent.model.digest), None, True
        if attempt is None:
            if self._is_over(stage.until):
                share = f"{stage.until:.0%} of " if stage.until < 1 else ""
                reason = f"out of time: {share}the budget of {self._options.budget_s:g} s is used up"
                self._seen.append(Attempt(move.name, parent.name, "skipped", reason))
                return None
            ends: list[bool] = []
            """The values that ``is_over`` has returned to the step so far. If any is True, the step could continue with more time."""

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
        model = model or self._store.model(attempt.digest)
        name = move.name if parent is self._root else f"{parent.name}+{move.name}"
        return "kept", KeptModel(name, model, move.precision or parent.precision, attempt), is_final

    def _try(
        self, move: Move, parent: KeptModel, scratch: Path, is_over: Callable[[], bool]
    ) -> tuple[Attempt, Artifact | None]:
        """Run one step, and measure and judge its model. An error ends the step but not the plan."""
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
            f"{measured.stored_bytes:,d} bytes as a coded model"
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
                raise DeadlineExceeded("stopped: out of time", "continue with a larger budget")

        self._on_progress(title, 0, 1)
        return report

    def _version(self, state: KeptModel) -> Version:
        return Version(
            state.model,
            state.precision,
            compression=state.name,
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
        want = (
            (f"{late} step(s) of the plan were not tried, because the budget was used up: give a larger one",)
            if late
            else ()
        )
        return (
            f"the plan judged models on {self._judge.data.count} samples held out from its training data",
            *few,
            *want,
        )


def _made(move: Move, model: Artifact, context: StepContext) -> Artifact:
    is_resumed = context.folder is not None and context.folder.exists()
    try:
        return move.make(model, context)
    except InvalidArgument:
        if not is_resumed or context.folder is None:
            raise
        # The stored progress may be damaged or from another library version, so the step starts again without it.
        shutil.rmtree(context.folder, ignore_errors=True)
        return move.make(model, context)


def known_key(model: Artifact, data: Dataset, options: PlanOptions) -> dict[str, str]:
    """The parts of a plan's identity that are known before optimising, by name.

    The identity includes the machine but not the budget.
    """
    machine = machine_facts()
    asked = {
        name: value for name, value in msgspec.structs.asdict(options).items() if name not in ("contract", "budget_s")
    }
    decisive = {**msgspec.structs.asdict(options.contract), **asked}
    del decisive["cut"]  # decided later, by the original's outputs on the evaluation data
    return {
        "version": __version__,
        "model": model.provenance[0].source_digest if model.provenance else model.digest,
        "data set": data.digest,
        "machine": " ".join((machine.cpu, *machine.isa)),
        **{name.replace("_", " "): str(value) for name, value in decisive.items()},
    }
