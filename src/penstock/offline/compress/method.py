"""Method: one way to make a model smaller or faster, with its options; and what a run of it is given and makes."""

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
"""What a method is for, each against the original."""
OnProgress = Callable[[str, int, int], None]
"""Called with the stage, the steps done and the steps in total."""

_CHECKPOINTS = "training-{}.kept"


class StepContext(msgspec.Struct, frozen=True):
    """What a method works with beside its options and the model that it goes on from."""

    original: Artifact
    """The model that results are judged against."""
    teacher: Artifact
    """The model whose answers are learned."""
    fitted: Dataset | None
    """Samples to calibrate and train on."""
    evaluation: Dataset | None = None
    """Samples that the result will be judged on."""
    judge: Judge | None = None
    """Judges intermediate models. None: the method holds a fifth of ``fitted`` out."""
    contract: Contract | None = None
    """In a plan, what the result must meet; it takes the place of the method's ``max_accuracy_loss``."""
    scheme: IntegerScheme = msgspec.field(default_factory=lambda: integer_scheme(machine_facts()))
    folder: Path | None = None
    """Where to keep progress, so that an interrupted run continues from there."""
    on_progress: OnProgress = lambda *_: None
    """Raises DeadlineExceeded to break the method off."""
    is_over: Callable[[], bool] = lambda: False
    """Whether a method that works in rounds shall end with what it has."""
    check_memory: Callable[[Artifact], None] = lambda _: None
    """Raises ResourceExhausted if the machine has too little memory to train a model."""
    options: dict[str, Any] = {}
    """Options that a plan sets in every method that has them."""
    placements: dict[str, QdqPlacement] = {}
    """The fastest placement, by the digest of the model, where it is known already."""

    def stage(self, name: str) -> Progress:
        """A callback that reports the progress of one stage."""
        self.on_progress(name, 0, 1)
        return lambda done, total: self.on_progress(name, done, total)

    @property
    def data(self) -> Dataset:
        """``fitted``, for methods that have said that they need it."""
        assert self.fitted is not None
        return self.fitted

    def held_out(self, threads: int) -> tuple[Dataset, Judge]:
        """Samples to fit on, and a judge on others."""
        if self.judge is not None:
            return self.data, self.judge
        fitted, held = hold_out(self.original, self.data)
        return fitted, Judge(self.original, held, threads)

    def once(self, name: str, make: Callable[[], Artifact], *decides: object) -> Artifact:
        """``make()``, or what it made before an interruption: measured times may have decided it, and training continues from it.

        ``decides`` is everything, as plain data, that ``name`` does not say.
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
    """What every training of a method is given."""

    checkpoint: Path
    on_progress: Progress


class Made(msgspec.Struct, frozen=True):
    """The result of one method."""

    model: Artifact | None
    """None for a method that only measures."""
    aims: tuple[Aim, ...] = ()
    """What the method is for."""
    facts: dict[str, Any] = {}
    """What scripts want to know, as plain data."""
    notes: tuple[str, ...] = ()
    """What a reader should know."""
    short: dict[Aim, str] = {}
    """Aims that the method itself found to be missed, with the reason."""
    files: dict[str, bytes] = {}
    """Pictures, reports and the like to write, by path."""
    heading: str = ""
    table: tuple[tuple[str, ...], ...] = ()
    """A table to show below ``heading``; the first row has the titles."""


class Method(Options, frozen=True, kw_only=True):
    """Base of the methods: its fields are the options of one method, ``run`` is what it does.

    A subclass lives in ``methods/``, is named in the table (``table.py``), and from there becomes a command, a function of
    ``penstock.compress`` and, if the table says so, steps of a plan. Its docstring is the help of the command.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    """Command lines, for the help."""
    data_options: ClassVar[tuple[str, ...]] = ("--train",)
    """The names of the command's option for the data that the method may see."""
    role: ClassVar[str] = "model"
    """What errors call the model; one that is no ``model`` is an option of that name."""
    titles: ClassVar[tuple[str, str]] = ("original", "made")
    writes_model: ClassVar[bool] = True

    threads: Count = 1
    """Threads to train and to measure with."""
    budget_s: Annotated[NotNegative, Usage("seconds")] = 3.0
    """Time to spend on each measurement of speed."""

    @property
    def trains(self) -> bool:
        """Whether a run with these options needs torch and data to train on."""
        return False

    @property
    def folds(self) -> bool:
        """Whether the model is to be optimised first, BatchNormalization folded into weights."""
        return True

    def reason_for_data(self) -> str:
        """Why a run with these options needs data; empty if it does not."""
        return "training" if self.trains else ""

    def examine(self, model: Artifact) -> None:
        """Raise PenstockError if a run on ``model`` is known to fail before any work."""

    def run(self, model: Artifact, context: StepContext) -> Made:
        """Apply the method to ``model``. Raises PenstockError."""
        raise NotImplementedError

    def allowance(self, context: StepContext, max_accuracy_loss: float) -> Contract:
        """The contract of the plan, or else one of the method's own ``max_accuracy_loss``."""
        return context.contract or Contract(max_accuracy_loss)


class TrainingMethod(Method, frozen=True, kw_only=True):
    """Base of the methods that can train."""

    epochs: Annotated[Positive | None, Usage(default="the method's")] = None
    """Passes over the training data."""
    seed: Seed = 0
    """Seed of everything random."""
    resume: Annotated[str | None, Usage("file")] = None
    """Folder for checkpoints: the same command continues from there after an interruption."""

    def check(self, spell: Callable[[str], str] = str) -> None:
        """Also raises InvalidArgument if ``resume`` is a file."""
        super().check(spell)
        if self.resume and Path(self.resume).exists() and not Path(self.resume).is_dir():
            raise InvalidArgument(
                f"'{self.resume}' is not a folder", f"name a new or an existing folder for {spell('resume')}"
            )

    def fit(self, defaults: Any) -> Any:
        """``defaults``, FitOptions, with the method's own epochs, seed and threads."""
        epochs = self.epochs or defaults.epochs
        return msgspec.structs.replace(defaults, epochs=epochs, seed=self.seed, threads=self.threads)

    def hooks(self, context: StepContext, start: Artifact, stage: str) -> TrainingHooks:
        """A progress callback, and a checkpoint for the model ``start`` that training starts from."""
        hooks: TrainingHooks = {"on_progress": context.stage(stage)}
        if context.folder:
            hooks["checkpoint"] = context.folder / _CHECKPOINTS.format(start.digest[:12])
        return hooks

    def recovered(self, made: Artifact, context: StepContext, **options: float) -> Artifact:
        """``made`` trained to answer as the teacher; ``options`` change the defaults of FitOptions."""
        context.check_memory(made)
        distill, model = needs_torch("training.distill"), needs_torch("training.trainable").TrainableModel(made)
        fit = self.fit(msgspec.structs.replace(needs_torch("training.options").FitOptions(), **options))
        report = distill.recover(model, context.data, context.teacher, fit, **self.hooks(context, made, "recover"))
        about = {"teacher": context.teacher.digest, "fit": msgspec.to_builtins(fit)}
        found: Artifact = model.to_artifact("recover", about, report.facts())
        return found


def needs_torch(module: str) -> Any:
    """A module of ``penstock.offline.compress`` that imports torch. Raises EngineUnavailable where torch is not installed."""
    return importlib.import_module(f"penstock.offline.compress.{module}")
