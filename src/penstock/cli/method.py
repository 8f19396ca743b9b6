"""What the commands of one compression method have in common: options, files, data, comparison, and how the result is told."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
import onnx
import typer
from google.protobuf.message import DecodeError
from rich.markup import escape

from penstock.artifact import Artifact
from penstock.bundle import coded
from penstock.cli.inspect import make_console
from penstock.cli.outcome import Aim, Outcome
from penstock.cli.progress import StageProgress
from penstock.cli.quantities import parse_seconds
from penstock.dataset import Dataset, load_dataset
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import (
    AlreadyExists,
    InvalidArgument,
    InvalidConfig,
    InvalidData,
    InvalidModel,
    PenstockError,
    Unsupported,
)
from penstock.offline.judge.accuracy import answers, make_reference
from penstock.offline.judge.judge import Judge
from penstock.offline.optimize.model import read_proto, self_contained
from penstock.offline.optimize.optimizer import optimize
from penstock.resources import machine_facts
from penstock.storage.atomic import check_writable, write_whole
from penstock.tensor import Signature

Model = Annotated[Path, typer.Argument(help="The trained model, an ONNX file.", show_default=False)]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where to write the ONNX file.", show_default=False)]
Calibrate = Annotated[Path | None, typer.Option(help="npz with samples to calibrate on, some hundred.")]
Train = Annotated[Path | None, typer.Option(help="npz with samples to train on; `labels` join in if there are any.")]
Fit = Annotated[
    Path | None,
    typer.Option(
        "--train", "--calibrate", help="npz with samples to calibrate and train on; `labels` join in if there are any."
    ),
]
Evaluate = Annotated[
    Path | None,
    typer.Option(
        help="npz to measure accuracy and speed on, which the method does not see; without it only sizes are told."
    ),
]
Loss = Annotated[str | None, typer.Option(help="Loss of accuracy allowed against the original, e.g. 0.5%.")]
Chart = Annotated[Path | None, typer.Option(help="Also write a picture here, an SVG file.")]


def check_above(option: str, least: float) -> Callable[[float | None], float | None]:
    """A callback for ``option``, a finite number above ``least``."""

    def check(value: float | None) -> float | None:
        if value is not None and not least < value < math.inf:
            raise InvalidArgument(f"{option} {value:g} makes no sense", f"give more than {least:g}")
        return value

    return check


Epochs = Annotated[
    float | None,
    typer.Option(callback=check_above("--epochs", 0), help="Passes over the training data; default: the method's."),
]
Budget = Annotated[str, typer.Option(help="Time to spend on each measurement of speed.")]
Seed = Annotated[int, typer.Option(min=0, max=(1 << 31) - 1, help="Of everything random.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads to train and to measure with.")]
Resume = Annotated[
    Path | None, typer.Option(help="Folder for checkpoints: the same command goes on from there if it was interrupted.")
]
Force = Annotated[bool, typer.Option("--force", help="Write over a target that is not an ONNX file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]

_FEW = 16
"""Samples below which what a method learns of them is worth a warning."""
_NOTHING_MEASURED = "speed and accuracy are not measured without --evaluate"


class Job:
    """One run of one method: a context manager for the work, then ``finish``.

    Whatever is wrong with the files is told when it is made, before any work. ``reads`` are further files that the command
    reads, ``writes`` those that it writes beside ``output``. ``fitted`` is what the method may see, ``evaluation`` what it is
    measured on; either may be None, but for the first if the method ``trains``. ``role`` is what errors call the model.
    """

    def __init__(
        self,
        model: Path,
        output: Path | None,
        *,
        fitted: Path | None = None,
        evaluate: Path | None = None,
        reads: Iterable[Path | None] = (),
        writes: Iterable[Path | None] = (),
        chart: Path | None = None,
        trains: bool = False,
        threads: int = 1,
        budget: str = "3s",
        force: bool = False,
        role: str = "model",
    ) -> None:
        if threads > (cores := machine_facts().cores):
            raise InvalidConfig(f"{threads} threads are more than this machine's {cores} core(s)", "give fewer")
        if trains:
            trained("training.torch")
        inputs = [path for path in (model, fitted, evaluate, *reads) if path is not None]
        if output is not None:
            check_target(output, inputs, force)
        others = [path for path in (*writes, chart) if path is not None]
        for number, path in enumerate(others):
            check_place(path, [*inputs, *([output] if output else []), *others[:number]])
        if chart is not None and chart.exists() and not force and not begins_with(chart, b"<svg"):
            raise AlreadyExists(f"'{chart}' exists and is not a picture", "choose another name for the picture")
        self.output, self.threads, self._trains = output, threads, trains
        self.budget_s = parse_seconds(budget)
        self.notes: list[str] = []
        self.short: dict[Aim, str] = {}
        """Where the method itself found that it won nothing."""
        self.original = read_model(model, role)
        with naming(model, role), loaded(self.original) as running:
            self.signature: Signature = running.signature
            if not self.signature.inputs:
                raise InvalidModel("it has no inputs, so that it always answers the same", "export it with inputs")
            self.fitted = self._load(fitted, running, judged=trains)
            self.evaluation = self._load(evaluate, running, judged=True)
        if trains:
            self.data("--train", "training")
        if self.fitted is not None and self.fitted.count < _FEW:
            few = f"'{fitted}' holds {self.fitted.count} sample(s): what is made of so few is a guess"
            print(f"warning: {few}; some hundred are usual", file=sys.stderr)
        self._progress = StageProgress()

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def stage(self, name: str) -> Callable[[int, int], None]:
        """A callback that draws the progress of one stage of the work."""
        return lambda done, total: self._progress(name, done, total)

    def data(self, option: str, why: str) -> Dataset:
        """What the method may see. Raises InvalidArgument if it was not given."""
        if self.fitted is None:
            raise InvalidArgument(f"{why} needs data", f"give {option} FILE.npz, arrays named after the model's inputs")
        return self.fitted

    def folded(self) -> Artifact:
        """The original optimised, BatchNormalization folded: what methods that change weights begin with. Told on stderr.

        Raises Unsupported if the method trains and the model has an operator that cannot be trained.
        """
        progress = self.stage("optimize")
        progress(0, 1)
        data = self.fitted or self.evaluation
        samples = [data.rows(0, self.signature.smallest_batch)] if data else []
        made, report = optimize(self.original, samples)
        progress(1, 1)
        if self._trains:
            trained("training.trainable").TrainableModel(made)
        if report.nodes_before != report.nodes_after:
            print(
                f"optimised first: {report.nodes_before} → {report.nodes_after} nodes ({', '.join(report.applied)})",
                file=sys.stderr,
            )
        return made

    def plain(self) -> Artifact:
        """The original with its weights inside, otherwise as it is."""
        return self_contained(self.original)

    def recovered(
        self, made: Artifact, data: Dataset, training: tuple[float | None, int], folder: Path | None = None
    ) -> Artifact:
        """``made`` trained to answer as the original again; ``training`` are epochs and seed, ``folder`` is for the checkpoint."""
        method = trained("training.distill")
        fit = fit_with(trained("training.options").FitOptions(), *training, self.threads)
        model = trained("training.trainable").TrainableModel(made)
        hooks = checkpoint(folder, made)
        report = method.recover(model, data, self.plain(), fit, on_progress=self.stage("recover"), **hooks)
        options = {"teacher": self.original.digest, "fit": msgspec.to_builtins(fit)}
        found: Artifact = model.to_artifact("recover", options, report.facts())
        return found

    def finish(
        self,
        made: Artifact,
        aims: Sequence[Aim],
        report: dict[str, Any],
        *,
        json: bool,
        titles: tuple[str, str] = ("original", "made"),
    ) -> None:
        """Compare ``made`` with the original if there are data for it, write it, and tell; ``report`` goes into the JSON object."""
        assert self.output is not None
        with_coded = "coded_size" in aims
        outcome = Outcome(
            original=self.original,
            made=made,
            comparison=Judge(self.original, self.evaluation, self.threads).compare(made, budget_s=self.budget_s)
            if self.evaluation
            else None,
            coded=(coded_bytes(self.plain()), coded_bytes(made)) if with_coded else None,
            short=self.short,
        )
        write_whole(self.output, made.data)
        notes = [*self.notes, *outcome.shortfalls(aims).values()]
        if json:
            print_json({**report, "output": str(self.output), **outcome.summary(aims), "notes": notes})
            return
        console = make_console()
        console.print(outcome.table(titles))
        for note in notes:
            console.print(f"[yellow]note[/yellow]    {escape(note)}")
        if outcome.comparison is None:
            console.print(f"[yellow]note[/yellow]    {_NOTHING_MEASURED}")
        console.print(f"written  {self.output}", markup=False)

    def _load(self, path: Path | None, running: LoadedModel, judged: bool = False) -> Dataset | None:
        """The data of ``path``, on which the model runs and whose labels, where it is ``judged``, fit."""
        if path is None:
            return None
        data = load_dataset(path, self.signature)
        try:
            outputs = answers(running, data)
            if judged:
                make_reference(outputs, data.labels)
        except PenstockError as error:
            cause = f"{error.message}, on samples of '{path}'"
            raise InvalidData(cause, error.hint or "check that the values suit the model") from error
        return data


def check_target(path: Path, inputs: Sequence[Path], force: bool, suffix: str = ".onnx") -> None:
    """Refuse now what could not, or must not, be written when the work is done. Raises InvalidArgument, AlreadyExists."""
    if path.suffix.lower() != suffix:
        raise InvalidArgument(f"'{path}' is no name for what is written", f"name it NAME{suffix}")
    check_place(path, inputs)
    if path.exists() and not force and not is_onnx(path):
        raise AlreadyExists(f"'{path}' exists and is not an ONNX file", "choose another name, or give --force")


def check_place(path: Path, others: Sequence[Path]) -> None:
    """Raise InvalidArgument if ``path`` is one of ``others``, or nothing can be written there."""
    target = path.resolve()
    for other in others:
        if other.resolve() == target:
            raise InvalidArgument(f"'{path}' would overwrite what this command reads or writes", "choose another name")
    check_writable(path)


def read_model(path: Path, role: str = "model") -> Artifact:
    """The ONNX file ``path``, checked. Raises NotFound, InvalidModel, Unsupported, which name the file and its ``role``."""
    if path.is_dir():
        raise InvalidModel(f"{role} '{path}' is a folder", "name the ONNX file")
    if begins_with(path, coded.MAGIC):
        fix = f"decode it first: penstock share {path} --decode -o {path.stem}.onnx"
        raise InvalidModel(f"{role} '{path}' is a coded model, not an ONNX file", fix)
    made = Artifact.from_file(path)
    with naming(path, role):
        read_proto(made)
    return made


@contextlib.contextmanager
def naming(path: Path, role: str = "model") -> Iterator[None]:
    """Name the file in whatever is wrong with the model in it."""
    try:
        yield
    except (InvalidModel, Unsupported) as error:
        raise type(error)(f"{role} '{path}': {error.message}", error.hint) from error


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether ``path`` is a regular file of that beginning, and can be read."""
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(magic)) == magic
    return False


def check_folder(path: Path | None) -> Path | None:
    """A folder for checkpoints, or where one can be made. Raises InvalidArgument."""
    if path is not None and path.exists() and not path.is_dir():
        raise InvalidArgument(f"'{path}' is not a folder", "name a folder for --resume, or one to be made")
    return path


def fit_with(defaults: Any, epochs: float | None, seed: int, threads: int) -> Any:
    """``defaults``, FitOptions, with what the command line says."""
    return msgspec.structs.replace(defaults, epochs=epochs or defaults.epochs, seed=seed, threads=threads)


def refuse(given: Mapping[str, object], without: str) -> None:
    """Raise InvalidArgument if one of the options ``given`` was used, which mean nothing ``without`` another."""
    for option, value in given.items():
        if value not in (None, False):
            raise InvalidArgument(f"{option} means nothing without {without}", f"add {without}, or leave {option} out")


def checkpoint(folder: Path | None, start: Artifact) -> dict[str, Any]:
    """What makes a training go on from ``folder``: one file for each model that training begins with."""
    return {"checkpoint": folder / f"training-{start.digest[:12]}.kept"} if folder else {}


def coded_bytes(model: Artifact) -> int:
    """Size as a coded model."""
    return len(coded.encode(model.data))


def trained(module: str) -> Any:
    """A module of ``penstock.offline.compress`` that needs torch. Raises EngineUnavailable where it is not installed."""
    return importlib.import_module(f"penstock.offline.compress.{module}")


@contextlib.contextmanager
def loaded(artifact: Artifact, threads: int = 1) -> Iterator[LoadedModel]:
    """``artifact`` in ONNX Runtime."""
    model = get_engine("onnxruntime").load(artifact, {"threads": threads})
    try:
        yield model
    finally:
        model.unload()


def print_json(report: dict[str, Any]) -> None:
    """One line on stdout."""
    print(msgspec.json.encode(report).decode())


def is_onnx(path: Path) -> bool:
    """Whether the file ``path`` holds a model."""
    try:
        return bool(onnx.load(path, load_external_data=False).HasField("graph"))
    except (DecodeError, OSError, ValueError):
        return False
