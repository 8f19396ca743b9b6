"""``penstock prune-channels``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.artifact import Artifact
from penstock.cli import method as shared
from penstock.cli.quantities import parse_share
from penstock.errors import InvalidArgument
from penstock.offline.compress.pruning.structured.cut import Structure
from penstock.offline.compress.pruning.structured.search import NarrowOptions, narrow
from penstock.offline.judge.contract import Contract

Importance = Literal["norm", "batch-norm", "activation", "taylor"]


def prune_channels(
    model: shared.Model,
    output: shared.Output,
    train: shared.Train = None,
    evaluate: shared.Evaluate = None,
    width: Annotated[str | None, typer.Option(help="Share of its units that each group keeps; default 75%.")] = None,
    speedup: Annotated[
        float | None,
        typer.Option(
            callback=shared.check_above("--speedup", 1),
            help="Times faster that the model shall become, e.g. 1.5; widths then differ.",
        ),
    ] = None,
    importance: Annotated[
        Importance, typer.Option(help="Which units go; activation and taylor need --train, taylor also torch.")
    ] = "norm",
    recover: Annotated[bool, typer.Option("--recover", help="Train what is left to answer as the original.")] = False,
    max_accuracy_loss: shared.Loss = None,
    block: Annotated[int, typer.Option(min=1, help="Widths are multiples of this.")] = 16,
    no_heads: Annotated[bool, typer.Option("--no-heads", help="Leave attention heads alone.")] = False,
    epochs: shared.Epochs = None,
    seed: shared.Seed = 0,
    resume: shared.Resume = None,
    threads: shared.Threads = 1,
    budget: shared.Budget = "3s",
    force: shared.Force = False,
    json: shared.Json = False,
) -> None:
    """Take the least important channels and attention heads out of a model: what is left is smaller, and dense.

    --recover needs --train and `pip install 'penstock\\[torch]'`. With --width it cuts once, then trains; with --speedup it
    cuts and trains in turn until the model is fast enough, as far as --max-accuracy-loss (1% unless given) allows, judged
    on a fifth of --train.

    [bold]Examples[/bold]

      penstock prune-channels model.onnx --width 75% --train train.npz --recover --evaluate test.npz -o narrow.onnx

      penstock prune-channels model.onnx --speedup 2 --train train.npz --recover --max-accuracy-loss 1% -o narrow.onnx
    """
    if not recover:
        shared.refuse({"--epochs": epochs, "--resume": resume}, "--recover")
    in_turn = recover and speedup is not None
    if not in_turn:
        shared.refuse({"--max-accuracy-loss": max_accuracy_loss}, "--recover and --speedup")
    elif width is not None or importance == "batch-norm":
        what = "--width" if width is not None else "--importance batch-norm"
        raise InvalidArgument(f"{what} means nothing where channels are cut in turn", "leave it out")
    narrowing = NarrowOptions(
        width=parse_width(width, speedup),
        speedup=speedup,
        importance=_OWN.get(importance, "norm"),
        block=block,
        heads=not no_heads,
        threads=threads,
    )
    narrowing.check()
    contract = Contract(parse_share(max_accuracy_loss or "1%"))
    shared.check_folder(resume)
    job = shared.Job(
        model, output, fitted=train, evaluate=evaluate, trains=recover, threads=threads, budget=budget, force=force
    )
    with job:
        # Folding takes away what batch-norm looks at.
        start = job.plain() if importance == "batch-norm" else job.folded()
        if in_turn:
            made = _in_turn(job, start, narrowing, importance, contract, (epochs, seed), resume)
        else:
            made = _once(job, start, narrowing, importance)
            if recover:
                made = job.recovered(made, job.data("--train", "--recover"), (epochs, seed), resume)
    parameters = made.provenance[-1].facts.get("parameters") if not recover else None
    if parameters:
        job.notes.append(f"{parameters[1]} of {parameters[0]} parameters are left")
    job.finish(made, ["size", "speed"], {"command": "prune-channels"}, json=json)


_OWN: dict[str, Literal["norm", "batch_norm", "activation"]] = {"batch-norm": "batch_norm", "activation": "activation"}


def parse_width(text: str | None, speedup: float | None) -> float:
    """The share of units to keep: 75 %, or all if a speed-up decides."""
    if text is None:
        return 0.75 if speedup is None else 1.0
    width = 1.0 if text.strip() == "100%" else parse_share(text)
    if not width:
        raise InvalidArgument(f"--width {text} leaves nothing of the model", "give more than 0%")
    return width


def _once(job: shared.Job, model: Artifact, options: NarrowOptions, importance: Importance) -> Artifact:
    data = job.data("--train", f"--importance {importance}") if importance in ("activation", "taylor") else job.fitted
    scores = None
    if importance == "taylor" and data is not None:
        method = shared.trained("pruning.structured.taylor")
        scores = method.by_taylor(Structure(model, exact=options.exact), data, on_progress=job.stage("scores"))
    return narrow(model, options, data, scores=scores, on_progress=job.stage("scores"))


def _in_turn(
    job: shared.Job,
    model: Artifact,
    narrowing: NarrowOptions,
    importance: Importance,
    contract: Contract,
    training: tuple[float | None, int],
    folder: Path | None,
) -> Artifact:
    method = shared.trained("pruning.structured.recovery")
    options = method.ShrinkOptions(
        speedup=narrowing.speedup,
        contract=contract,
        importance=importance,
        fit=shared.fit_with(method.ShrinkOptions().fit, *training, job.threads),
        block=narrowing.block,
        heads=narrowing.heads,
        threads=job.threads,
    )
    data = job.data("--train", "--recover")
    made: Artifact = method.shrink(model, data, options, folder=folder, on_progress=job.stage("rounds"))
    facts = made.provenance[-1].facts
    if not facts["reached"]:
        found = facts["rounds"][facts["chosen"]]["speedup"]
        why = facts["rounds"][-1]["objection"] or "nothing was left to cut"
        job.short["speed"] = (
            f"{found:.2f} times faster when measured in the run, not {narrowing.speedup:g} times: {why}"
        )
    return made
