"""``penstock build``: make a bundle of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from penstock.bundle.evidence import CandidateRecord
from penstock.bundle.titles import described, title
from penstock.cli import options
from penstock.cli.flags.quantities import parse_counts, parse_seconds
from penstock.cli.inspect import show
from penstock.cli.interrupts import finishing_early
from penstock.cli.views.progress import StageProgress
from penstock.cli.views.tables import make_console
from penstock.errors import InvalidArgument
from penstock.offline.build import BuildResult, Recipe
from penstock.offline.build import build as build_bundle
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.deadline import BuildDeadline
from penstock.perf.report import check_report_target, write_report
from penstock.storage.atomic import real_path

_BEST = "best"
"""The method that chooses each tensor's range by its effect on the outputs. It also equalises channels and corrects biases."""


def build(
    model: options.Model,
    output: options.Output,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="A few hundred samples for INT8 calibration: npz file of rows, folder of npz files, images or sounds, JSON lines, "
            "CSV, Parquet, or module:function."
        ),
    ] = None,
    evaluate: options.Evaluate = None,
    synthetic: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="COUNT",
            help="Without data: make COUNT plausible samples to calibrate on, and as many to judge. Without COUNT: 16 to 256, by"
            " size. Accuracy then means fidelity to the original on these samples.",
            show_default=False,
        ),
    ] = None,
    max_accuracy_loss: options.MaxAccuracyLoss = "1%",
    p99: options.P99 = None,
    prove_accuracy: options.ProveAccuracy = False,
    metric: options.Metric = "",
    metric_output: options.MetricOutput = "",
    max_output_error: options.MaxOutputError = "10%",
    trust_labels: options.TrustLabels = False,
    objective: Annotated[
        Literal["latency", "throughput"],
        typer.Option(help="Optimise calls of a single row (latency) or of 16 rows (throughput)."),
    ] = "latency",
    name: options.Name = "",
    model_version: Annotated[
        str, typer.Option(help="Version of the model when served: a whole number of at least 1.")
    ] = "1",
    engine: Annotated[list[str] | None, typer.Option(help="Try only this engine; may be repeated.")] = None,
    threads: options.Threads = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Try only this INT8 calibration method; may be repeated. `none`: no INT8.")
    ] = None,
    keep_float: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Keep matching operators and tensors in float: names of the model, in which * stands for any text; may be repeated.",
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Time limit for the whole build, e.g. 90s or 10m. Most builds need less. At the limit or on Ctrl-C, the best "
            "candidate that was measured so far is packed."
        ),
    ] = "2m",
    report: options.Report = None,
    folder: Annotated[bool, typer.Option("--folder", help="Write the bundle as a folder, not as one file.")] = False,
    parents: options.Parents = False,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Build a bundle: optimise, quantise, measure and choose under a contract.

    A sample has an array for each input of the model. An npz file of rows has all samples in one array per input; a folder has an npz
    file for each sample. Samples may differ in size. Values named `labels` are used to measure accuracy. Without --calibrate, INT8 is
    not tried. Without --evaluate, a fifth of the calibration data is held out for evaluation.
    --synthetic needs no data, but it can only compare the result with the original.

    [bold]Examples[/bold]

      penstock build model.onnx --calibrate train.npz --evaluate test.npz -o digits.bundle

      penstock build model.onnx --synthetic -o digits.bundle

      penstock build model.onnx --evaluate test.npz --max-accuracy-loss 0.5% --p99 5ms -o digits.bundle --report report.html
    """
    recipe = Recipe(
        contract=options.read_contract(
            max_accuracy_loss, max_output_error, p99, metric, metric_output, prove_accuracy, trust_labels
        ),
        name=name,
        version=model_version,
        engines=tuple(engine or ()),
        threads=parse_counts(threads) if threads else (),
        methods=_methods(method),
        careful=method is None or _BEST in method,
        dynamic=method is None,
        objective=objective,
        keep_float=tuple(keep_float or ()),
        synthetic=synthetic,
        budget_s=parse_seconds(budget),
        overwrite=force,
        folder=folder,
    )
    check_places(output, report, [given for given in (model, calibrate, evaluate) if given is not None])
    options.check_folders([output, report], parents)
    deadline = BuildDeadline(recipe.budget_s)
    with StageProgress() as progress, finishing_early(deadline):
        result = build_bundle(model, output, calibrate, evaluate, recipe, progress, deadline)
    show_result(result, report, json)


def show_result(result: BuildResult, report: Path | None, json: bool) -> None:
    """Write the report, and print the result as tables or as one JSON object."""
    if report is not None:
        write_report(report, result.manifest, bundle=str(result.bundle))
    if json:
        print(msgspec.json.encode(summary(result)).decode())
        return
    console = make_console()
    show(console, result.manifest, result.bundle_bytes)
    console.print(f"bundle  {result.bundle}" + (f"\nreport  {report}" if report else ""), markup=False)


def check_places(output: Path, report: Path | None, inputs: list[Path]) -> None:
    """Raise an error before the build if an output would overwrite an input, or the report would be inside the bundle."""
    places = {real_path(given) for given in inputs}
    for target in (output, *([report] if report else [])):
        if real_path(target) in places:
            raise InvalidArgument(
                f"'{target}' is an input of this command and cannot be overwritten", "choose another name"
            )
    if report is not None:
        if real_path(output) in (real_path(report), *real_path(report).parents):
            raise InvalidArgument(
                f"the report '{report}' cannot be inside the bundle '{output}'", "choose another name"
            )
        check_report_target(report)


def summary(result: BuildResult) -> dict[str, Any]:
    """The stable JSON form of a build, for scripts."""
    chosen, baseline = result.chosen, result.evidence.baseline
    accuracy = chosen.accuracy
    return {
        "bundle": str(result.bundle),
        "chosen": {
            "name": chosen.name,
            "title": title(chosen),
            "engine": chosen.engine,
            "precision": chosen.precision,
            "threads": chosen.threads,
            "batch": chosen.batch,
        },
        "baseline": _figures(baseline),
        "built": {**_figures(chosen), "size_bytes": chosen.disk_bytes, "bundle_bytes": result.bundle_bytes},
        "speedup": chosen.speedup.value if chosen.speedup else 1.0,
        "speedup_interval": msgspec.to_builtins(chosen.speedup),
        "accuracy_loss": accuracy.loss.value if accuracy else 0.0,
        "accuracy_loss_interval": msgspec.to_builtins(accuracy.loss) if accuracy else None,
        "accuracy_loss_bound": accuracy.bound if accuracy else None,
        "metric": accuracy.metric if accuracy else None,
        "metric_outputs": list(result.evidence.metric_outputs),
        "metric_reason": result.evidence.metric_reason,
        "seen_rows": result.evidence.seen_rows,
        "synthetic": result.evidence.synthetic,
        "by_size": msgspec.to_builtins(result.evidence.by_size),
        "candidates": [described(record) for record in result.evidence.candidates],
        "attempts": [msgspec.to_builtins(attempt) for attempt in result.evidence.attempts],
        "conditions": msgspec.to_builtins(result.evidence.conditions),
        "notes": list(result.evidence.notes),
    }


def _figures(record: CandidateRecord) -> dict[str, Any]:
    return {
        "latency_ms": record.latency_ms,
        "p99_ms": record.p99_ms,
        "accuracy": record.accuracy.value if record.accuracy else None,
        "size_bytes": record.size_bytes,
    }


def _methods(names: list[str] | None) -> tuple[RangeMethod, ...]:
    if names is None:
        return tuple(RangeMethod)
    if names == ["none"]:
        return ()
    if "none" in names:
        raise InvalidArgument("--method none cannot be combined with others", "remove none, or remove the others")
    known = {method.value: method for method in RangeMethod}
    for name in names:
        if name not in known and name != _BEST:
            raise InvalidArgument(
                f"unknown calibration method '{name}'", f"use one of: {', '.join(known)}, {_BEST}, none"
            )
    return tuple(known[name] for name in names if name != _BEST)
