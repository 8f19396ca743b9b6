"""``penstock compress``: search for the best sequence of compression methods, and make a bundle of the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli import options
from penstock.cli.build import check_places, show_result
from penstock.cli.flags.quantities import parse_counts, parse_seconds
from penstock.cli.views.progress import StageProgress
from penstock.offline.build import Compression, Recipe, build
from penstock.offline.compress.planner.plan_store import remove_plan

_BUILD_SHARE, _MIN_BUILD_S, _MAX_BUILD_S = 0.2, 20.0, 120.0
"""Time for quantising and the final choice, in addition to the plan's budget: a fraction of it, and the limits in seconds."""


def compress(
    model: options.Model,
    output: options.Output,
    train: Annotated[
        Path,
        typer.Option(
            help="npz file with samples to calibrate and train on; an array named `labels` is used if present.",
            show_default=False,
        ),
    ],
    evaluate: options.Evaluate = None,
    max_accuracy_loss: options.MaxAccuracyLoss = "1%",
    prove_accuracy: options.ProveAccuracy = False,
    metric: options.Metric = "",
    metric_output: options.MetricOutput = "",
    max_output_error: options.MaxOutputError = "10%",
    trust_labels: options.TrustLabels = False,
    target: Annotated[
        Literal["latency", "size"], typer.Option(help="Minimise the latency of single rows, or the size of the bundle.")
    ] = "latency",
    p99: options.P99 = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Time limit for starting steps of the search. A running step may exceed the limit by 50% (at least 30s). "
            "Quantising before the search and measuring after it are not included."
        ),
    ] = "10m",
    epochs: Annotated[float, typer.Option(help="Passes over the data in each training run.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    threads: options.Threads = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Folder for finished steps. Default: the output's name with .plan, removed at the end."),
    ] = None,
    name: options.Name = "",
    report: options.Report = None,
    parents: options.Parents = False,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Compress a model under a contract. Tries pruning, factorisation, quantisation, weight sharing and training.

    Training needs no labels, because it reproduces the original's outputs. Repeat the command to continue an interrupted run. Steps
    that train the model need `pip install 'penstock\\[torch]'`.

    [bold]Examples[/bold]

      penstock compress model.onnx --train train.npz --evaluate test.npz -o fast.bundle

      penstock compress model.onnx --train train.npz --evaluate test.npz --target size --max-accuracy-loss 0.5% -o small.bundle
    """
    check_places(output, report, [given for given in (model, train, evaluate) if given is not None])
    options.check_folders([output, report], parents)
    budget_s = parse_seconds(budget)
    folder = resume or output.with_name(f"{output.name}.plan")
    recipe = Recipe(
        contract=options.read_contract(
            max_accuracy_loss, max_output_error, p99, metric, metric_output, prove_accuracy, trust_labels
        ),
        name=name,
        threads=parse_counts(threads) if threads else (),
        objective="size" if target == "size" else "latency",
        careful=False,  # the plan has a step for this
        compression=Compression(budget_s, epochs, seed, folder),
        budget_s=min(_MAX_BUILD_S, max(_MIN_BUILD_S, _BUILD_SHARE * budget_s)),
        overwrite=force,
    )
    with StageProgress() as progress:
        result = build(model, output, train, evaluate, recipe, progress)
    show_result(result, report, json)
    if resume is None:
        remove_plan(folder)
