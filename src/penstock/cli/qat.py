"""``penstock qat``."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from penstock.cli import method as shared
from penstock.cli.quantize import METHODS, MethodName, PlacementName, check_float, place, prepare
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.resources import machine_facts


def qat(
    model: shared.Model,
    output: shared.Output,
    train: shared.Fit = None,
    evaluate: shared.Evaluate = None,
    method: Annotated[MethodName, typer.Option(help="How ranges are found that training starts from.")] = "best",
    placement: Annotated[PlacementName, typer.Option(help="What becomes int8; fastest measures both.")] = "fastest",
    no_equalize: Annotated[
        bool, typer.Option("--no-equalize", help="Leave channels of unlike ranges as they are.")
    ] = False,
    epochs: shared.Epochs = None,
    seed: shared.Seed = 0,
    resume: shared.Resume = None,
    threads: shared.Threads = 1,
    budget: shared.Budget = "3s",
    force: shared.Force = False,
    json: shared.Json = False,
) -> None:
    """Quantise a model to INT8, then train the integers and scales to answer as the float model.

    Needs `pip install 'penstock\\[torch]'`, and no labels. A fifth of --train is held out; if training wins nothing there,
    the INT8 model is written as quantisation left it, and that is told. Try penstock quantize first: it takes seconds.

    [bold]Examples[/bold]

      penstock qat model.onnx --train train.npz --evaluate test.npz -o int8.onnx

      penstock qat model.onnx --train train.npz --epochs 50 --resume qat.checkpoints -o int8.onnx
    """
    shared.check_folder(resume)
    training = shared.trained("training.qat")
    options = training.QatOptions()
    options = msgspec.structs.replace(options, fit=shared.fit_with(options.fit, epochs, seed, threads))
    job = shared.Job(
        model, output, fitted=train, evaluate=evaluate, trains=True, threads=threads, budget=budget, force=force
    )
    check_float(job)
    with job:
        data = job.data("--train", "training")
        prepared = prepare(job, data, not no_equalize)
        placed = place(job, prepared, data, placement)
        recipe = PtqRecipe(METHODS.get(method), placed, equalize=False, correct_biases=False)
        start = quantize_with(recipe, prepared, data, integer_scheme(machine_facts()), job.stage("int8"))
        hooks = {**shared.checkpoint(resume, start), "on_progress": job.stage("train")}
        made = training.train_quantized(start, prepared, data, options, teacher=job.plain(), **hooks)
    facts = made.provenance[-1].facts
    if facts["kept"] == "start":
        job.short["accuracy"] = "training won nothing: the file is the INT8 model as quantisation left it"
    before, after = facts["held_out_loss"]
    job.notes.append(f"loss on held-out samples {before:.4g} as quantised, {after:.4g} after training")
    job.finish(made, ["size", "speed"], {"command": "qat", "placement": placed.value, "kept": facts["kept"]}, json=json)
