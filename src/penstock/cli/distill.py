"""``penstock distill``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from penstock.artifact import Artifact
from penstock.cli import method as shared
from penstock.cli.quantities import parse_share
from penstock.dataset import Dataset
from penstock.offline.judge.accuracy import answers, make_reference
from penstock.offline.sessions import signature_of


def distill(
    output: shared.Output,
    student: Annotated[Path, typer.Option(help="ONNX file to train, of any architecture.", show_default=False)],
    teacher: Annotated[
        Path, typer.Option(help="ONNX file to learn from, of the same inputs and outputs.", show_default=False)
    ],
    train: shared.Train = None,
    evaluate: shared.Evaluate = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            callback=shared.check_above("--temperature", 0),
            help="How much the teacher's small probabilities count, 2 to 8; default 4.",
        ),
    ] = None,
    teacher_share: Annotated[
        str | None, typer.Option(help="The teacher's part beside the labels'; default 70%, without labels all.")
    ] = None,
    epochs: shared.Epochs = None,
    seed: shared.Seed = 0,
    resume: shared.Resume = None,
    threads: shared.Threads = 1,
    budget: shared.Budget = "3s",
    force: shared.Force = False,
    json: shared.Json = False,
) -> None:
    """Train a student model to answer as a teacher does, from the teacher's answers to unlabelled data.

    Needs `pip install 'penstock\\[torch]'`. The weights that the student brings are where training starts. More data, also
    such that nobody labelled, helps more than more epochs.

    [bold]Examples[/bold]

      penstock distill --student small.onnx --teacher large.onnx --train train.npz -o trained.onnx

      penstock distill --student small.onnx --teacher large.onnx --train train.npz --evaluate test.npz --epochs 300 -o trained.onnx
    """
    shared.check_folder(resume)
    method = shared.trained("training.distill")
    options = method.DistillOptions()
    options = msgspec.structs.replace(
        options,
        fit=shared.fit_with(options.fit, epochs, seed, threads),
        temperature=options.temperature if temperature is None else temperature,
        teacher_share=parse_share(teacher_share) if teacher_share not in (None, "100%") else (teacher_share and 1.0),
    )
    options.check()
    shared.check_target(output, [student, teacher], force)
    start = shared.read_model(student, "student")
    with shared.naming(student, "student"):
        own = signature_of(start)
    with shared.naming(teacher, "teacher"):
        method.check_signatures(own, signature_of(shared.read_model(teacher, "teacher")))
    job = shared.Job(
        teacher,
        output,
        fitted=train,
        evaluate=evaluate,
        reads=[student],
        trains=True,
        threads=threads,
        budget=budget,
        force=force,
        role="teacher",
    )
    with job:
        data = job.data("--train", "training")
        hooks = {**shared.checkpoint(resume, start), "on_progress": job.stage("train")}
        made = method.distill(start, job.original, data, options, **hooks)
    accuracy = None
    if job.evaluation is not None:
        accuracy, after = _accuracies(job.original, [start, made], job.evaluation)
        job.notes.append(f"the student was at {accuracy:.2%} before training, {after:.2%} after")
        if after <= accuracy:
            job.short["accuracy"] = "training won nothing on the evaluation data"
    report = {"command": "distill", "student": {"size_bytes": start.size_bytes, "accuracy": accuracy}}
    job.finish(made, ["size", "speed"], report, json=json, titles=("teacher", "student"))


def _accuracies(teacher: Artifact, students: list[Artifact], data: Dataset) -> list[float]:
    with shared.loaded(teacher) as model:
        reference = make_reference(answers(model, data), data.labels)
    found = []
    for student in students:
        with shared.loaded(student) as model:
            found.append(reference.compare(answers(model, data)).value)
    return found
