"""``penstock compress``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from penstock.cli.build import check_places, summary
from penstock.cli.inspect import make_console, show
from penstock.cli.progress import StageProgress
from penstock.cli.quantities import parse_counts, parse_milliseconds, parse_seconds, parse_share
from penstock.offline.build import Compression, Recipe, build
from penstock.offline.compress.planner.plan_store import remove_plan
from penstock.offline.judge.contract import Contract
from penstock.perf.report import write_report

_TIMING_SHARE, _MOST_TIMING_S = 0.1, 20.0
"""What the choice among the plan's models and all others takes beside the plan, of its budget and in seconds."""


def compress(
    model: Annotated[Path, typer.Argument(help="The trained model, an ONNX file.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the bundle.", show_default=False)],
    train: Annotated[
        Path, typer.Option(help="npz with samples to calibrate and train on; `labels` help.", show_default=False)
    ],
    evaluate: Annotated[
        Path | None, typer.Option(help="npz with samples that nothing is trained on, to judge accuracy on.")
    ] = None,
    max_accuracy_loss: Annotated[
        str, typer.Option(help="Loss of accuracy allowed against the original, e.g. 1%.")
    ] = "1%",
    prove_accuracy: Annotated[
        bool, typer.Option("--prove-accuracy", help="Demand the loss bound at 95% confidence.")
    ] = False,
    target: Annotated[
        Literal["latency", "size"], typer.Option(help="Be fastest at single rows, or smallest in the bundle.")
    ] = "latency",
    p99: Annotated[str | None, typer.Option(help="p99 latency of one call that is demanded, e.g. 5ms.")] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Time to begin steps in; one under way then may take half as much again, 30s at least, and is then broken "
            "off. Quantising before and choosing after come on top."
        ),
    ] = "10m",
    epochs: Annotated[float, typer.Option(help="Passes over the data of each training.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of all that is drawn at random.")] = 0,
    threads: Annotated[str | None, typer.Option(help="Thread counts to try, e.g. 1,2.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Folder for what was tried; default: the output's name with .plan, removed when done."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the model when served; default: the bundle's file name.")] = "",
    report: Annotated[Path | None, typer.Option(help="Also write an HTML report here.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a target that is not a bundle.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Compress a model under a contract: prune, split, quantise, share, train; keep what pays, and say why the rest did not.

    No labels are needed: what is trained learns the original's answers. An interrupted run goes on where it stopped when
    the same command is given again. Steps that train need `pip install 'penstock\\[torch]'`.

    [bold]Examples[/bold]

      penstock compress model.onnx --train train.npz --evaluate test.npz -o fast.bundle

      penstock compress model.onnx --train train.npz --evaluate test.npz --target size --max-accuracy-loss 0.5% -o small.bundle
    """
    check_places(output, report, [given for given in (model, train, evaluate) if given is not None])
    budget_s = parse_seconds(budget)
    folder = resume or output.with_name(f"{output.name}.plan")
    recipe = Recipe(
        contract=Contract(parse_share(max_accuracy_loss), parse_milliseconds(p99) if p99 else None, prove_accuracy),
        name=name,
        threads=parse_counts(threads) if threads else (),
        objective="size" if target == "size" else "latency",
        careful=False,  # the plan's own INT8 is
        compression=Compression(budget_s, epochs, seed, folder),
        budget_s=min(_MOST_TIMING_S, _TIMING_SHARE * budget_s),
        overwrite=force,
    )
    with StageProgress() as progress:
        result = build(model, output, train, evaluate, recipe, progress)
    if report is not None:
        write_report(report, result.manifest)
    if resume is None:
        remove_plan(folder)
    if json:
        print(msgspec.json.encode(summary(result)).decode())
    else:
        console = make_console()
        show(console, result.manifest, result.bundle_bytes)
        console.print(f"bundle  {result.bundle}" + (f"\nreport  {report}" if report else ""), markup=False)
