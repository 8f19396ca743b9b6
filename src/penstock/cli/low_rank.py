"""``penstock low-rank``."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import method as shared
from penstock.cli.quantities import parse_share
from penstock.offline.compress.low_rank.factorize import FactorizeOptions, factorize


def low_rank(
    model: shared.Model,
    output: shared.Output,
    train: shared.Fit = None,
    evaluate: shared.Evaluate = None,
    max_error: Annotated[
        str | None, typer.Option(help="Mean relative error of the outputs that may be added; default 5%.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, help="This rank for every matrix product, whatever it costs or saves.")
    ] = None,
    speedup: Annotated[
        float | None,
        typer.Option(
            callback=shared.check_above("--speedup", 1),
            help="Stop where the layers' times promise this for the model, e.g. 1.5.",
        ),
    ] = None,
    min_ms: Annotated[
        float, typer.Option(min=0, help="Leave layers alone that take fewer milliseconds than this.")
    ] = FactorizeOptions().min_ms,
    recover: Annotated[
        bool, typer.Option("--recover", help="Train the thin layers to answer as the original.")
    ] = False,
    epochs: shared.Epochs = None,
    seed: shared.Seed = 0,
    resume: shared.Resume = None,
    threads: shared.Threads = 1,
    budget: shared.Budget = "3s",
    force: shared.Force = False,
    json: shared.Json = False,
) -> None:
    """Split products and convolutions into thinner ones wherever that saves measured time, within an error of the outputs.

    Needs data, no labels. --recover needs `pip install 'penstock\\[torch]'`, and bears a --max-error that is larger.
    It pays in large layers only: small models are refused, and that is told.

    [bold]Examples[/bold]

      penstock low-rank model.onnx --calibrate train.npz --evaluate test.npz -o thin.onnx

      penstock low-rank model.onnx --train train.npz --max-error 15% --recover --evaluate test.npz -o thin.onnx
    """
    if not recover:
        shared.refuse({"--epochs": epochs, "--resume": resume}, "--recover")
    if rank is not None:
        shared.refuse({"--max-error": max_error, "--speedup": speedup}, "a choice of ranks, which --rank makes")
    options = FactorizeOptions(
        max_error=parse_share(max_error or "5%"), target_speedup=speedup, rank=rank, min_ms=min_ms, threads=threads
    )
    shared.check_folder(resume)
    job = shared.Job(
        model, output, fitted=train, evaluate=evaluate, trains=recover, threads=threads, budget=budget, force=force
    )
    with job:
        data = job.data("--calibrate", "low rank")
        made = factorize(job.folded(), data, options, progress=job.stage("factorise"))
        facts = made.provenance[-1].facts
        if recover:
            made = job.recovered(made, data, (epochs, seed), resume)
    split = {name: way for name, way in facts["layers"].items() if way}
    job.notes.append(f"{len(split)} layer(s) split; outputs moved by {facts['error']:.2%} before any training")
    job.finish(made, ["speed"], {"command": "low-rank", "error": facts["error"], "layers": split}, json=json)
