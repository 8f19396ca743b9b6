"""``penstock quantize``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import typer

from penstock.artifact import Artifact
from penstock.cli import method as shared
from penstock.cli import outcome
from penstock.cli.quantities import parse_share
from penstock.dataset import Dataset
from penstock.errors import InvalidArgument
from penstock.offline.compress.precision.dynamic import DynamicOptions, quantize_dynamic
from penstock.offline.compress.precision.groups import MixedModel
from penstock.offline.compress.precision.half import HalfOptions, halve_weights
from penstock.offline.compress.precision.mixed import choose
from penstock.offline.compress.precision.sensitivity import SensitivityOptions, measure_sensitivity
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.fastest import FastestOptions, fastest_placement
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement, nothing_to_quantise
from penstock.offline.compress.ptq.ranges.chart import range_chart
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import PtqRecipe, equalized, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge
from penstock.resources import machine_facts
from penstock.storage.atomic import write_whole

MethodName = Literal["best", "min-max", "percentile", "mse", "entropy"]
PlacementName = Literal["fastest", "linear", "wide"]
Precision = Literal["int8", "int8-dynamic", "int8-weights", "int4-weights", "fp16-weights", "bf16-weights"]
METHODS = {method.value: method for method in RangeMethod}
"""By name; None stands for the best, tensor by tensor."""
_ROWS = 32
"""Samples that give the ranges with which placements are timed."""
_BLOCKS = (16, 32, 64, 128, 256)


def quantize(
    model: shared.Model,
    output: shared.Output,
    calibrate: shared.Calibrate = None,
    evaluate: shared.Evaluate = None,
    precision: Annotated[
        Precision,
        typer.Option(help="int8 calibrates; int8-dynamic takes ranges at run time; the rest is of weights only."),
    ] = "int8",
    method: Annotated[
        MethodName, typer.Option(help="How int8 finds ranges; best tries all, tensor by tensor.")
    ] = "best",
    placement: Annotated[PlacementName, typer.Option(help="What becomes int8; fastest measures both.")] = "fastest",
    no_equalize: Annotated[
        bool, typer.Option("--no-equalize", help="Leave channels of unlike ranges as they are.")
    ] = False,
    no_bias_correction: Annotated[
        bool, typer.Option("--no-bias-correction", help="Leave in the shift of means that rounding makes.")
    ] = False,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Leave groups of operators float that cost too much accuracy.")
    ] = False,
    max_accuracy_loss: shared.Loss = None,
    block: Annotated[
        int | None,
        typer.Option(help="Weights that share a scale, of int8-weights and int4-weights: 16 to 256; default 32."),
    ] = None,
    chart: shared.Chart = None,
    chart_tensor: Annotated[
        str | None, typer.Option(help="The tensor to draw; default: where the methods differ most.")
    ] = None,
    threads: shared.Threads = 1,
    budget: shared.Budget = "3s",
    force: shared.Force = False,
    json: shared.Json = False,
) -> None:
    """Quantise a model after training, without changing what it learned.

    The arrays in the npz files are named after the model's inputs, one row per sample; `labels` holds class numbers.
    int8 and int8-dynamic need --calibrate. --chart draws the search for the range of one tensor. --mixed keeps within
    --max-accuracy-loss (1% unless given) of the original, judged on a fifth of the calibration data.

    [bold]Examples[/bold]

      penstock quantize model.onnx --calibrate train.npz --evaluate test.npz -o int8.onnx

      penstock quantize model.onnx --precision int4-weights -o int4.onnx
    """
    if precision != "int8":
        shared.refuse({"--mixed": mixed, "--chart": chart, "--no-equalize": no_equalize}, "--precision int8")
    if not mixed:
        shared.refuse({"--max-accuracy-loss": max_accuracy_loss}, "--mixed")
    if precision not in ("int8-weights", "int4-weights"):
        shared.refuse({"--block": block}, "--precision int8-weights or int4-weights")
    shared.refuse({"--chart-tensor": chart_tensor if chart is None else None}, "--chart")
    contract = Contract(parse_share(max_accuracy_loss or "1%"))
    job = shared.Job(
        model, output, fitted=calibrate, evaluate=evaluate, chart=chart, threads=threads, budget=budget, force=force
    )
    facts: dict[str, Any] = {
        "command": "quantize",
        "precision": precision,
        "placement": None,
        "float_groups": [],
        "chart": None,
    }
    if not precision.endswith("16-weights"):
        check_float(job)
    with job:
        if precision == "int8":
            data = job.data("--calibrate", "int8")
            prepared = prepare(job, data, not no_equalize)
            if chart is not None:
                picture = range_chart(collect(prepared, data.inputs), integer_scheme(machine_facts()), chart_tensor)
            placed = place(job, prepared, data, placement)
            if mixed:
                made, facts["float_groups"] = _mixed(
                    job, prepared, data, placed, METHODS.get(method, RangeMethod.MSE), contract
                )
            else:
                recipe = PtqRecipe(METHODS.get(method), placed, equalize=False, correct_biases=not no_bias_correction)
                made = quantize_with(recipe, prepared, data, integer_scheme(machine_facts()), job.stage("int8"))
            facts["placement"] = placed.value
        else:
            made = _without_ranges(job, precision, 32 if block is None else block)
    if chart is not None:
        write_whole(chart, picture.encode())
        facts["chart"] = str(chart)
    aims: list[outcome.Aim] = ["size"] if precision.endswith("weights") else ["size", "speed"]
    job.finish(made, aims, facts, json=json)


def check_float(job: shared.Job) -> None:
    """Raise Unsupported, before any work, if the model is quantised already or has no weights."""
    model = FloatModel(job.original)
    if not any(len(weight.dims) >= 2 for weight in model.weights.values()):
        raise nothing_to_quantise()


def prepare(job: shared.Job, data: Dataset, equalize: bool) -> Artifact:
    """The original folded, channels of like ranges."""
    model = job.folded()
    if not equalize:
        return model
    progress = job.stage("equalise")
    progress(0, 1)
    model = equalized(model, data)
    progress(1, 1)
    return model


def place(job: shared.Job, model: Artifact, data: Dataset, name: PlacementName) -> QdqPlacement:
    """The placement of that name, or the one that this machine runs fastest."""
    if name != "fastest":
        return QdqPlacement(name)
    progress = job.stage("place")
    progress(0, 1)
    rows = job.signature.smallest_batch
    statistics = collect(model, data.rows(0, max(rows, _ROWS // rows * rows)))
    options = FastestOptions(threads=job.threads, budget_s=job.budget_s)
    found = fastest_placement(model, statistics, data, [integer_scheme(machine_facts())], options)
    progress(1, 1)
    return found[0].placement


def _mixed(
    job: shared.Job, model: Artifact, data: Dataset, placement: QdqPlacement, method: RangeMethod, contract: Contract
) -> tuple[Artifact, list[str]]:
    """INT8 but for the groups that cost the most accuracy for the time they save, and these."""
    fitted, held = data.split(0.2, job.signature.smallest_batch)
    mixed = MixedModel(model, collect(model, fitted.inputs), integer_scheme(machine_facts()), placement, method)
    trials = Trials(mixed, Judge(job.original, held, job.threads))
    report = measure_sensitivity(trials, SensitivityOptions(budget_s=job.budget_s), on_progress=job.stage("rank"))
    found = choose(trials, report, contract)
    floats = list(found.float_groups)
    job.notes.append(
        f"{len(floats)} of {len(report.groups)} groups stay float{': ' if floats else ''}{', '.join(floats)}"
    )
    return found.artifact, floats


def _without_ranges(job: shared.Job, precision: Precision, block: int) -> Artifact:
    if precision == "int8-dynamic":
        data = job.data("--calibrate", "int8-dynamic tells whether answers depend on their batch, which")
        options = DynamicOptions(reduce_range=integer_scheme(machine_facts()).reduce_range)
        made = quantize_dynamic(job.folded(), data, options)
        if not made.provenance[-1].facts["batch_invariant"]:
            job.notes.append("a sample's answer depends on the samples that it is batched with")
        return made
    if precision.startswith("int"):
        if block not in _BLOCKS:
            raise InvalidArgument(
                f"weights cannot share a scale {block} at a time", f"give one of {_BLOCKS} to --block"
            )
        bits: Literal[4, 8] = 4 if precision == "int4-weights" else 8
        return quantize_weights(job.folded(), job.fitted, WeightOnlyOptions(bits=bits, block_size=cast(Any, block)))
    return halve_weights(job.folded(), HalfOptions("fp16" if precision == "fp16-weights" else "bf16"))
