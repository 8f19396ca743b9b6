"""Method: one way to make a model smaller or faster, with its options, context and result."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import msgspec

from penstock.artifact import Artifact, sha256
from penstock.dataset import Dataset
from penstock.errors import InvalidArgument
from penstock.offline.compress.checkpoint import read_model, write_model
from penstock.offline.compress.options import Count, NotNegative, Options, Positive, Seed, Usage
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.scheme import IntegerScheme, integer_scheme
from penstock.offline.compress.taps import Progress
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge, hold_out
from penstock.resources import machine_facts

Aim = Literal["size", "coded_size", "speed", "accuracy"]
"""A quantity that a method improves, relative to the original."""
OnProgress = Callable[[str, int, int], None]
"""Called with the stage, the number of finished steps, and the total."""

_CHECKPOINTS = "training-{}.kept"


class StepContext(msgspec.Struct, frozen=True):
    """The inputs of a method, apart from its options and the model to change."""

    original: Artifact
    """The model with which results are compared."""
    teacher: Artifact
    """The model whose outputs training reproduces."""
    fitted: Dataset | None
    """Samples to calibrate and train on."""
    evaluation: Dataset | None = None
    """Samples to measure the result on."""
    judge: Judge | None = None
    """Judges intermediate models. If None, the method holds out a fifth of ``fitted``."""
    contract: Contract | None = None
    """In a plan, the contract that replaces the method's ``max_accuracy_loss``."""
    scheme: IntegerScheme = msgspec.field(default_factory=lambda: integer_scheme(machine_facts()))
    folder: Path | None = None
    """Folder for progress, from which an interrupted run continues."""
    on_progress: OnProgress = lambda *_: None
    """Callback for progress. The callback raises DeadlineExceeded to stop the method."""
    is_over: Callable[[], bool] = lambda: False
    """Returns True when a method that works in rounds must end with its best result so far."""
    check_memory: Callable[[Artifact], None] = lambda _: None
    """Raises ResourceExhausted if training a model needs more memory than the machine has."""
    options: dict[str, Any] = {}
    """Option values that a plan sets, by name. They apply to every method that has the option."""
    placements: dict[str, QdqPlacement] = {}
    """The fastest QDQ placement of each model that was already measured, by the model's digest."""

    def stage(self, name: str) -> Progress:
        """A callback that reports the progress of one stage."""
        self.on_progress(name, 0, 1)
        return lambda done, total: self.on_progress(name, done, total)

    @property
    def data(self) -> Dataset:
        """``fitted``, for methods that require data."""
        assert self.fitted is not None
        return self.fitted

    def held_out(self, threads: int, contract: Contract) -> tuple[Dataset, Judge]:
        """The samples that the method uses, and a judge that uses other samples and the metric of ``contract``."""
        if self.judge is not None:
            return self.data, self.judge
        fitted, held = hold_out(self.original, self.data)
        return fitted, Judge(self.original, held, threads, contract=contract)

    def once(self, name: str, make: Callable[[], Artifact], *decides: object) -> Artifact:
        """Return the result stored by an earlier run. If there is none, call ``make()``, and store and return its result. Since
        methods measure times, a second call of ``make()`` could give a different result.

        The result is stored under ``name`` and a digest of ``decides``, which must be plain data.
        """
        if self.folder is None:
            return make()
        path = self.folder / f"{name}-{sha256(repr(decides).encode())[:12]}.model"
        found = read_model(path)
        if found is None:
            found = make()
            write_model(path, found)
        return found


class TrainingHooks(TypedDict, total=False):
    """Arguments of every training run."""

    checkpoint: Path
    on_progress: Progress


class Made(msgspec.Struct, frozen=True):
    """The result of one method."""

    model: Artifact | None
    """The changed model; None if the method only measures."""
    aims: tuple[Aim, ...] = ()
    """The quantities that the method should improve."""
    facts: dict[str, Any] = {}
    """Facts about the result, as plain data for the JSON output."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    short: dict[Aim, str] = {}
    """Aims that the method missed according to its own measurements, each with the reason."""
    files: dict[str, bytes] = {}
    """Pictures, reports and other files to write, by path."""
    heading: str = ""
    table: tuple[tuple[str, ...], ...] = ()
    """A table to print below ``heading``, with the titles in the first row."""


class Method(Options, frozen=True, kw_only=True):
    """Base of the methods. The fields are the options.

    A subclass in ``methods/`` with a row in the table (``table.py``) is a command, a function of ``penstock.compress`` and, with steps
    in the table, part of a plan. Its docstring is the help of the command.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    """Command lines for the help."""
    data_options: ClassVar[tuple[str, ...]] = ("--train",)
    """Names of the command-line option for the method's data."""
    role: ClassVar[str] = "model"
    """Name of the model in error messages. If it differs from ``model``, it is also the command's option for the model."""
    titles: ClassVar[tuple[str, str]] = ("original", "made")
    writes_model: ClassVar[bool] = True

    threads: Count = 1
    """Threads for training and measuring."""
    budget_s: Annotated[NotNegative, Usage("seconds")] = 3.0
    """Time to spend on each measurement of speed."""
    metric: Annotated[str, Usage(default="what suits the outputs and labels")] = ""
    """Accuracy metric: a name listed by penstock build --help, or module:function for a custom metric."""
    metric_output: Annotated[str, Usage(default="the first that fits")] = ""
    """Name of the output on which accuracy is measured."""
    trust_labels: bool = False
    """Accept labels on which the original is no better than chance."""

    @property
    def contract(self) -> Contract:
        """A contract with the metric of these options."""
        return Contract(metric=self.metric, output=self.metric_output, trust_labels=self.trust_labels)

    @property
    def trains(self) -> bool:
        """True if a run with these options needs torch and training data."""
        return False

    @property
    def folds(self) -> bool:
        """True if the model is optimised first, with BatchNormalization folded into weights."""
        return True

    @property
    def needs_fp32(self) -> bool:
        """True if a model of another float type is converted to FP32 first."""
        return True

    def reason_for_data(self) -> str:
        """The reason why a run with these options needs data; empty if it needs none."""
        return "training" if self.trains else ""

    def examine(self, model: Artifact) -> None:
        """Raise PenstockError if a run on ``model`` would fail."""

    def run(self, model: Artifact, context: StepContext) -> Made:
        """Apply the method to ``model``. Raises PenstockError."""
        raise NotImplementedError

    def allowance(self, context: StepContext, max_accuracy_loss: float) -> Contract:
        """The contract of the plan or, without a plan, a contract with ``max_accuracy_loss``."""
        return context.contract or msgspec.structs.replace(self.contract, max_accuracy_loss=max_accuracy_loss)


class TrainingMethod(Method, frozen=True, kw_only=True):
    """Base of the methods that can train."""

    epochs: Annotated[Positive | None, Usage(default="depends on the method")] = None
    """Passes over the training data."""
    seed: Seed = 0
    """Seed of all random numbers."""
    resume: Annotated[str | None, Usage("file")] = None
    """Folder for checkpoints, from which the same command continues after an interruption."""

    def check(self, spell: Callable[[str], str] = str) -> None:
        """Check the options as in the base class. Also raises InvalidArgument if ``resume`` is a file."""
        super().check(spell)
        if self.resume and Path(self.resume).exists() and not Path(self.resume).is_dir():
            raise InvalidArgument(
                f"'{self.resume}' is not a folder", f"name a new or an existing folder for {spell('resume')}"
            )

    def fit(self, defaults: Any) -> Any:
        """A copy of ``defaults`` (FitOptions) with the epochs, seed and threads of this method."""
        epochs = self.epochs or defaults.epochs
        return msgspec.structs.replace(defaults, epochs=epochs, seed=self.seed, threads=self.threads)

    def hooks(self, context: StepContext, start: Artifact, stage: str) -> TrainingHooks:
        """A progress callback and a checkpoint path, for training that starts from the model ``start``."""
        hooks: TrainingHooks = {"on_progress": context.stage(stage)}
        if context.folder:
            hooks["checkpoint"] = context.folder / _CHECKPOINTS.format(start.digest[:12])
        return hooks

    def recovered(self, made: Artifact, context: StepContext, **options: float) -> Artifact:
        """Train ``made`` to reproduce the teacher's outputs. ``options`` override the defaults of FitOptions."""
        context.check_memory(made)
        distill, model = needs_torch("training.distill"), needs_torch("training.trainable").TrainableModel(made)
        fit = self.fit(msgspec.structs.replace(needs_torch("training.options").FitOptions(), **options))
        report = distill.recover(model, context.data, context.teacher, fit, **self.hooks(context, made, "recover"))
        about = {"teacher": context.teacher.digest, "fit": msgspec.to_builtins(fit)}
        found: Artifact = model.to_artifact("recover", about, report.facts())
        return found


def needs_torch(module: str) -> Any:
    """Import a module of ``penstock.offline.compress`` that needs torch. Raises EngineUnavailable if torch is not installed."""
    return importlib.import_module(f"penstock.offline.compress.{module}")
