"""``penstock prune``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.artifact import Artifact
from penstock.cli import method as shared
from penstock.cli.quantities import parse_share
from penstock.errors import InvalidArgument
from penstock.offline.compress.pruning.layer_sparsity import allocate, measure_layers
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions
from penstock.offline.compress.pruning.magnitude import prune as prune_at_once
from penstock.offline.compress.pruning.n_m import NMOptions, prune_n_m
from penstock.offline.judge.contract import Contract
from penstock.perf.chart import Scale, line_chart
from penstock.storage.atomic import write_whole


def prune(
    model: shared.Model,
    output: shared.Output,
    train: shared.Train = None,
    evaluate: shared.Evaluate = None,
    sparsity: Annotated[str | None, typer.Option(help="Share of the weights that become zero; default 90%.")] = None,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Share the zeros out by what each layer bears, measured on --train.")
    ] = False,
    n_m: Annotated[str | None, typer.Option(help="Keep N of every M weights instead, e.g. 2:4.")] = None,
    iterative: Annotated[
        bool, typer.Option("--iterative", help="Prune and retrain in turn, as far as --max-accuracy-loss allows.")
    ] = False,
    levels: Annotated[int | None, typer.Option(min=1, max=100, help="Times to prune and retrain; default 8.")] = None,
    max_accuracy_loss: shared.Loss = None,
    skip: Annotated[list[str] | None, typer.Option(help="A weight to leave alone, by name; may be repeated.")] = None,
    chart: shared.Chart = None,
    epochs: shared.Epochs = None,
    seed: shared.Seed = 0,
    resume: shared.Resume = None,
    threads: shared.Threads = 1,
    budget: shared.Budget = "3s",
    force: shared.Force = False,
    json: shared.Json = False,
) -> None:
    """Make the smallest weights of a model zero. The file stays as large; coded, it becomes small (see penstock share).

    At once it needs no data. --iterative needs --train, judges on a fifth of it, and stops where the loss of accuracy
    (0.5% unless given) would be larger. --chart draws accuracy by sparsity: of each layer alone, or, with --iterative,
    of the levels.

    [bold]Examples[/bold]

      penstock prune model.onnx --sparsity 70% --evaluate test.npz -o pruned.onnx

      penstock prune model.onnx --iterative --train train.npz --evaluate test.npz --sparsity 95% -o pruned.onnx
    """
    if not iterative:
        given = {"--levels": levels, "--max-accuracy-loss": max_accuracy_loss, "--epochs": epochs, "--resume": resume}
        shared.refuse(given, "--iterative")
    if n_m and (iterative or per_layer or sparsity):
        raise InvalidArgument("--n-m excludes --iterative, --per-layer and --sparsity", "leave it out, or these")
    if iterative and per_layer:
        raise InvalidArgument("--iterative excludes --per-layer", "leave one of them out")
    share, skipped = parse_share(sparsity or "90%"), tuple(skip or ())
    if share > (cap := GlobalRule().layer_cap):
        raise InvalidArgument(f"--sparsity {sparsity} leaves a layer nothing", f"give at most {cap:.0%}")
    pattern = _pattern(n_m, skipped) if n_m else None
    contract = Contract(parse_share(max_accuracy_loss or "0.5%"))
    shared.check_folder(resume)
    job = shared.Job(
        model,
        output,
        fitted=train,
        evaluate=evaluate,
        chart=chart,
        trains=iterative,
        threads=threads,
        budget=budget,
        force=force,
    )
    picture = ""
    with job:
        start = job.folded()
        goal = PruneOptions(GlobalRule(share), skip=skipped)
        if iterative:
            made = _iterative(job, start, goal, contract, levels or 8, (epochs, seed), resume)
            picture = _levels_chart(made.provenance[-1].facts)
        else:
            if per_layer or chart is not None:
                data = job.data("--train", "measuring what each layer bears")
                found = measure_layers(start, data, goal, on_progress=job.stage("layers"))
                picture = found.chart()
                if per_layer:
                    goal = PruneOptions(allocate(found.curves, share).rule, skip=skipped)
            made = prune_n_m(start, pattern) if pattern else prune_at_once(start, goal)
    if chart is not None:
        write_whole(chart, picture.encode())
    facts = made.provenance[-1].facts
    job.notes.append(
        f"{facts['sparsity']:.2%} of {facts['weights']} weights are zero, {facts['fewer']:g}x fewer are left"
    )
    if pattern:
        job.notes.append("the pattern is for engines that use it: a CPU multiplies by the zeros, no faster than before")
    report = {"command": "prune", "sparsity": facts["sparsity"], "chart": str(chart) if chart else None}
    job.finish(made, ["coded_size"], report, json=json)


def _pattern(text: str, skip: tuple[str, ...]) -> NMOptions:
    match = re.fullmatch(r"(\d{1,2}):(\d{1,2})", text.strip())
    if match is None or not 1 <= int(match[1]) < int(match[2]) <= 64:
        raise InvalidArgument(f"'{text}' is not a pattern N:M", "write it like 2:4, N below M, M at most 64")
    return NMOptions(int(match[1]), int(match[2]), skip=skip)


def _iterative(
    job: shared.Job,
    model: Artifact,
    goal: PruneOptions,
    contract: Contract,
    levels: int,
    training: tuple[float | None, int],
    folder: Path | None,
) -> Artifact:
    data, method = job.data("--train", "--iterative"), shared.trained("pruning.iterative")
    retrain = shared.fit_with(method.IterativeOptions().retrain, *training, job.threads)
    options = method.IterativeOptions(goal, levels, contract, retrain)
    made: Artifact = method.prune_iteratively(model, data, options, folder=folder, on_progress=job.stage("levels"))
    return made


def _levels_chart(facts: dict[str, Any]) -> str:
    """SVG of accuracy by sparsity: the levels, and the original pruned at once to the same."""
    levels = [(level["sparsity"], level["accuracy"]) for level in facts["levels"]]
    scales = Scale("sparsity", "{:.0%}"), Scale(facts["metric"], "{:.1%}")
    lines = {"at once": facts["one_shot"], "iterative": levels}
    return line_chart(lines, "Accuracy by sparsity", *scales, [("original", facts["original_accuracy"])])
