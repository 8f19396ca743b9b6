"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from penstock.artifact import local_path
from penstock.cli.flags.quantities import parse_milliseconds, parse_share
from penstock.errors import NotFound
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.metric_table import METRICS

Model = Annotated[
    Path,
    typer.Argument(help="The trained model: an ONNX file, or any source of `penstock convert`.", show_default=False),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Path of the bundle.", show_default=False)]
Evaluate = Annotated[
    Path | None,
    typer.Option(help="Samples to measure accuracy on, as for --calibrate; `labels` are used if present."),
]
MaxAccuracyLoss = Annotated[str, typer.Option(help="Maximum loss of accuracy against the original, e.g. 1%.")]
MaxOutputError = Annotated[
    str,
    typer.Option(
        help="Maximum difference of any output from the original's: fraction of changed classes, or relative error. If accuracy"
        " cannot be measured, this is the only limit."
    ),
]
Metric = Annotated[
    str,
    typer.Option(
        help=f"Metric of accuracy: {', '.join(METRICS)}; or your own module:function. Default: depends on the outputs and labels."
    ),
]
MetricOutput = Annotated[str, typer.Option(help="Output that the metric judges; default: the first suitable output.")]
TrustLabels = Annotated[
    bool, typer.Option("--trust-labels", help="Accept labels on which the original is no better than chance.")
]
ProveAccuracy = Annotated[
    bool, typer.Option("--prove-accuracy", help="Require that the loss limit is proven at 95% confidence.")
]
P99 = Annotated[str | None, typer.Option(help="Required p99 latency of one call, e.g. 5ms.")]
Threads = Annotated[str | None, typer.Option(help="Thread counts to try, e.g. 1,2.")]
Name = Annotated[str, typer.Option(help="Name of the served model; default: the bundle's file name.")]
Report = Annotated[Path | None, typer.Option(help="Also write an HTML report to this path.")]
Parents = Annotated[bool, typer.Option("--parents", help="Create the folders of the output files if they are missing.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the target even if it is not a bundle.")]
AllowPython = Annotated[
    bool, typer.Option("--allow-python", help="Run the Python steps of the pipeline. Only for pipelines you trust.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def check_folders(outputs: Iterable[Path | None], parents: bool) -> None:
    """Raise NotFound if the folder of an output file does not exist, unless ``parents`` is true: the command then creates it."""
    for output in outputs:
        if output is not None and not parents and not local_path(output).parent.exists():
            raise NotFound(
                f"the folder '{output.parent}' for '{output.name}' does not exist", "create it, or use --parents"
            )


def read_contract(
    max_accuracy_loss: str,
    max_output_error: str,
    p99: str | None,
    metric: str,
    metric_output: str,
    prove_accuracy: bool,
    trust_labels: bool,
) -> Contract:
    """Make the contract from these options. Raises InvalidArgument, InvalidConfig."""
    return Contract(
        parse_share(max_accuracy_loss),
        parse_milliseconds(p99) if p99 else None,
        prove_accuracy,
        max_output_error=parse_share(max_output_error),
        metric=metric,
        output=metric_output,
        trust_labels=trust_labels,
    )
