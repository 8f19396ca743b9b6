"""``penstock infer``: run a bundle or model over the rows of an npz file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console

from penstock.bundle.manifest import Manifest
from penstock.cli import options
from penstock.dataset import Dataset, load_dataset
from penstock.errors import InvalidArgument, PenstockError
from penstock.offline.judge.accuracy import make_reference, not_finite
from penstock.offline.judge.metric_table import METRICS
from penstock.runtime import open as open_model
from penstock.storage.atomic import check_writable, real_path, whole_file
from penstock.tensor import Array


def infer(
    bundle: Annotated[Path, typer.Argument(help="A bundle or a model file.", show_default=False)],
    inputs: Annotated[
        Path,
        typer.Option(
            help="npz file with arrays named after the model's inputs, with one row per sample.", show_default=False
        ),
    ],
    outputs: Annotated[Path | None, typer.Option(help="Write the outputs to this npz file.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows per call; default: the batch size of the bundle, else 32.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Run a bundle or model over the rows of an npz file, in this process.

    If the file contains an array named `labels`, the command also reports the accuracy, by the metric of the bundle's contract.

    [bold]Examples[/bold]

      penstock infer digits.bundle --inputs test.npz

      penstock infer digits.bundle --inputs test.npz --outputs answers.npz --json
    """
    if outputs is not None:
        _check_target(outputs, bundle, inputs)
    with open_model(bundle) as model:
        data = load_dataset(inputs, model.signature)
        start = time.perf_counter()
        results = model.infer_rows(data.inputs, batch)
        seconds = time.perf_counter() - start
        variant = model.variant.name if model.variant else None
    if outputs is not None:
        write_npz(outputs, results)
    metric, accuracy, why_none = _accuracy(model.manifest, data, results)
    facts: dict[str, Any] = {
        "model": model.name,
        "variant": variant,
        "rows": data.count,
        "seconds": seconds,
        "rows_per_second": data.count / seconds,
        "metric": metric or None,
        "accuracy": accuracy,
        "accuracy_note": why_none,
        "outputs": {name: list(array.shape) for name, array in results.items()},
        "written": str(outputs) if outputs else None,
    }
    if json:
        print(msgspec.json.encode(facts).decode())
        return
    console = Console()
    console.print(
        f"{data.count} rows in {seconds * 1e3:.1f} ms ({facts['rows_per_second']:.0f} rows/s) on {variant or 'onnxruntime'}"
    )
    for name, array in results.items():
        console.print(f"{name}  {array.dtype}{list(array.shape)}")
    if accuracy is not None:
        value = f"{accuracy:.2%}" if METRICS[metric].is_share else f"{accuracy:.4g}"
        console.print(f"accuracy  {value} {metric} of {data.count} labels")
    elif why_none:
        console.print(f"accuracy  not computed: {why_none}")
    if outputs is not None:
        console.print(f"written to {outputs}")


def write_npz(path: Path, arrays: dict[str, Array]) -> None:
    """Write ``arrays`` to ``path`` atomically. Raises ResourceExhausted."""
    with whole_file(path) as file:
        # numpy would store objects as pickles, which are unsafe to load, so text becomes fixed-width bytes.
        np.savez(file, **{name: a.astype("S") if a.dtype.hasobject else a for name, a in arrays.items()})  # type: ignore[arg-type]


def _check_target(outputs: Path, bundle: Path, inputs: Path) -> None:
    """Raise InvalidArgument before any work if the target is an input or cannot be written."""
    target = real_path(outputs)
    for what, source in (("bundle or model", bundle), ("inputs", inputs)):
        if target.is_relative_to(real_path(source)):
            raise InvalidArgument(f"'{outputs}' would overwrite the {what}", "choose another name for the outputs")
    check_writable(outputs)


def _accuracy(manifest: Manifest | None, data: Dataset, outputs: dict[str, Array]) -> tuple[str, float | None, str]:
    """The metric, its value for the labels, and the reason if there are labels but no value.

    The metric is the one of the bundle's contract. If there is none, or if it does not use labels, the metric suits the outputs and
    the labels. A bundle must not run code, so a function ``module:function`` of its builder is not called.
    """
    if data.labels is None:
        return "", None, ""
    evidence = manifest.evidence if manifest else None
    metric, judged = (
        (evidence.metric, *evidence.metric_outputs[:1]) if evidence and evidence.metric_outputs else ("", "")
    )
    if metric and metric not in METRICS:
        return metric, None, f"the metric of the bundle's contract is the function {metric}, which infer does not call"
    if metric and not METRICS[metric].labels:
        metric = judged = ""
    if broken := not_finite(outputs):
        return metric, None, broken
    try:
        reference = make_reference(outputs, data.labels, metric, judged)
        return reference.metric, reference.value(outputs), ""
    except PenstockError as error:
        return metric, None, error.message
