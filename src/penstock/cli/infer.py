"""``penstock infer``: run a bundle or model over the samples of a file or folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.markup import escape

from penstock.artifact import Artifact, Format, format_of, listed, refuse_declaration
from penstock.bundle.evidence import Evidence
from penstock.bundle.open import is_pipeline, may_be_bundle, open_bundle, open_model
from penstock.bundle.titles import variant_title
from penstock.cli import options
from penstock.cli.flags.operators import Ops, run_operators
from penstock.cli.flags.sources import runnable
from penstock.cli.views.answers import infer_pipeline
from penstock.cli.views.tables import make_console
from penstock.dataset import Dataset
from penstock.engines.registry import engine_title, engines_for
from penstock.errors import InvalidArgument, NotFound, PenstockError
from penstock.inputs.hints import hints_for
from penstock.inputs.meanings import meanings_of
from penstock.inputs.missing import takes_missing
from penstock.offline.judge.accuracy import joined
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import checked_reference, coupling_notes
from penstock.offline.judge.metric_table import METRICS
from penstock.runtime import MODELS, Model
from penstock.runtime.model import load_bundle, load_file
from penstock.samples.hints import InputHints
from penstock.samples.open import load_dataset
from penstock.samples.user_code import is_function
from penstock.storage.atomic import check_writable, real_path, replacing, whole_file
from penstock.tensor import Array


class _Judged(msgspec.Struct, frozen=True):
    """The accuracy of the outputs."""

    metric: str = ""
    outputs: tuple[str, ...] = ()
    reason: str = ""
    """The reason for the metric."""
    accuracy: float | None = None
    why_none: str = ""
    """The reason if there are labels but no value."""


def infer(
    bundle: Annotated[
        Path,
        typer.Argument(
            help=f"A bundle, or a model: {listed(MODELS)}, or any source of `penstock convert`.", show_default=False
        ),
    ],
    items: Annotated[
        list[str] | None,
        typer.Argument(
            help="For a pipeline: files or texts, one per item, - for the standard input; or NAME=VALUE for each input of one item.",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="For a model, samples: npz file of rows, folder of npz files, JSON lines, CSV, Parquet, or module:function.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="For a pipeline: a text. May be repeated.")] = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="For a pipeline: draw the boxes of the item on its picture.")
    ] = None,
    outputs: Annotated[
        Path | None,
        typer.Option(
            help="Write the outputs to this npz file or, without a suffix, to a new folder, one npz per sample."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows per call. Default: the bundle's batch size; 32 for a model file.")
    ] = None,
    trust_labels: Annotated[
        bool, typer.Option("--trust-labels", help="Accept labels on which the model is no better than chance.")
    ] = False,
    allow_python: options.AllowPython = False,
    ops: Ops = None,
    parents: options.Parents = False,
    json: options.Json = False,
) -> None:
    """Run a pipeline on files or texts, or a model over samples, in this process.

    A pipeline prints its outputs as JSON, as a server answers; for several items, one line for each.

    For a model, a sample is one row or, if the model has no batch axis, one call. If the samples have `labels`, the command also
    reports the accuracy. The bundle's contract names the metric and the judged outputs.

    [bold]Examples[/bold]

      penstock infer ocr.bundle photo.jpg --draw boxes.png

      penstock infer digits.bundle --inputs test.npz

      penstock infer digits.bundle --inputs test.npz --outputs answers.npz --json
    """
    options.check_folders([outputs, draw], parents)
    run_operators(ops)
    if is_pipeline(bundle):
        if inputs is not None or outputs is not None:
            raise InvalidArgument(f"'{bundle}' is a pipeline, which takes files", f"penstock infer {bundle} FILE")
        infer_pipeline(bundle, items or [], text or [], draw, allow_python, json)
        return
    refuse_declaration(bundle)
    if items or text or draw is not None:
        _check_model(bundle)
        raise InvalidArgument(f"'{bundle}' is a model, which takes tensors", "name their file with --inputs")
    if inputs is None:
        raise InvalidArgument("--inputs is missing", "name a file of samples, e.g. --inputs test.npz")
    _infer_model(bundle, inputs, outputs, batch, trust_labels, json)


def _check_model(given: Path) -> None:
    """Raises NotFound, IntegrityError or InvalidArgument if ``given``, which is no bundle of a pipeline, cannot be a model."""
    if given.exists() and may_be_bundle(given):
        open_bundle(given)
    elif not given.exists() and not is_function(str(given)):
        raise NotFound(f"no bundle or model '{given}'", "check the path, or pack a pipeline with `penstock pack`")


def _infer_model(
    bundle: Path, inputs: Path, outputs: Path | None, batch: int | None, trust_labels: bool, json: bool
) -> None:
    if outputs is not None:
        _check_target(outputs, bundle, inputs)
    opened = open_model(path := runnable(bundle))
    with load_file(opened, path) if isinstance(opened, Artifact) else load_bundle(opened) as model:
        independent = model.signature.batchable and not model.coupling
        # The states of a sequence are those that this model returns.
        states = hints_for(meanings_of(model.signature), model.infer).states
        artifact = (
            opened if isinstance(opened, Artifact) else opened.artifact(model.variant or opened.manifest.variants[0])
        )
        hints = InputHints(states, model.infer, missing=takes_missing(artifact))
        data = load_dataset(inputs, model.signature, independent=independent, hints=hints)
        start = time.perf_counter()
        results = _run(model, data, batch, outputs)
        seconds = time.perf_counter() - start
        variant = model.variant.name if model.variant else None
    coupling = model.coupling if data.joins else ""
    judged = _judged(model.manifest.evidence if model.manifest else None, data, results, trust_labels, coupling)
    notes = coupling_notes(coupling, batch or 1)
    facts: dict[str, Any] = {
        "model": model.name,
        "variant": variant,
        "rows": data.count,
        "seconds": seconds,
        "rows_per_second": data.count / seconds,
        "metric": judged.metric or None,
        "metric_outputs": judged.outputs,
        "metric_reason": judged.reason,
        "accuracy": judged.accuracy,
        "accuracy_note": judged.why_none,
        "notes": notes,
        "outputs": {name: list(array.shape) for name, array in results.items()},
        "written": str(outputs) if outputs else None,
    }
    if json:
        print(msgspec.json.encode(facts).decode())
        return
    console = make_console()
    shown = escape(_engine(model, bundle))
    kind = "rows" if data.joins else "calls"
    console.print(f"{data.count} {kind} in {seconds * 1e3:.1f} ms ({facts['rows_per_second']:.0f}/s) on {shown}")
    for name, array in results.items():
        console.print(f"{name}  {array.dtype}{list(array.shape)}")
    if judged.accuracy is not None:
        value = f"{judged.accuracy:.2%}" if METRICS[judged.metric].is_share else f"{judged.accuracy:.4g}"
        names = ", ".join(f"'{name}'" for name in judged.outputs)
        told = f"{value} {judged.metric} of {data.count} labels, output {names} ({judged.reason})"
        console.print(f"accuracy  {told}", markup=False, soft_wrap=True)
    elif judged.why_none:
        console.print(f"accuracy  not computed: {judged.why_none}", markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    if outputs is not None:
        console.print(f"written to {outputs}")


def _run(model: Model, data: Dataset, batch: int | None, target: Path | None) -> dict[str, Array]:
    """The outputs, one row per sample, which are also written to ``target``."""
    if target is not None and _is_folder(target):
        with replacing(target, overwrite=False) as folder:
            folder.mkdir()
            return joined(data.call_samples(1), _each(model, data, folder, target))
    if not data.stacks:
        results = joined(data.call_samples(1), _each(model, data, None, target))
    else:
        calls = data.calls(model.rows_per_call(batch))
        results = model.infer_calls((call.inputs, len(call.samples)) for call in calls)
    if target is not None:
        write_npz(target, results)
    return results


def _each(model: Model, data: Dataset, folder: Path | None, target: Path | None) -> Iterator[dict[str, Array]]:
    """The outputs of each sample, which are also written to ``folder``, if given.

    Raises InvalidArgument if the outputs of two samples differ in shape and ``target`` is a single file.
    """
    first: dict[str, Array] = {}
    for samples, inputs in data.calls(1):
        found = model.infer(inputs)
        first = first or found
        differing = [name for name in first if first[name].shape != found[name].shape]
        if folder is not None:
            write_npz(folder / f"{samples[0]:08d}.npz", found)
        elif target is not None and differing:
            raise InvalidArgument(
                f"output '{differing[0]}' has shape {list(first[differing[0]].shape)} in sample 0, but "
                f"{list(found[differing[0]].shape)} in sample {samples[0]}, which one npz file cannot hold",
                f"write one file per sample: --outputs {target.with_suffix('')}",
            )
        yield found


def _is_folder(target: Path) -> bool:
    return target.is_dir() or not target.suffix


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
    if _is_folder(outputs) and outputs.exists():
        raise InvalidArgument(f"'{outputs}' exists and is not an npz file", "name a new folder, or an npz file")
    check_writable(outputs)


def _engine(model: Model, path: Path) -> str:
    """The title of the running variant or, for the model file ``path``, of its engine."""
    if model.variant is not None:
        return variant_title(model.variant.name, model.manifest.evidence if model.manifest else None)
    format = format_of(path) or Format.ONNX  # other sources were converted
    return engine_title(engines_for(format)[0])


def _judged(
    evidence: Evidence | None, data: Dataset, outputs: dict[str, Array], trust_labels: bool, coupling: str
) -> _Judged:
    """The accuracy by the metric, on the outputs, and with the rule for labels of the bundle's contract, as ``penstock build`` judges.

    If there is no contract, or if its metric does not use labels, the metric suits the outputs and the labels. A bundle must not run
    code, so a function ``module:function`` of its builder is not called.
    """
    if data.labels is None:
        return _Judged()
    metric, reason, cut = "", "", None
    if evidence is not None and evidence.metric_outputs:
        outputs = {name: array for name, array in outputs.items() if name in evidence.metric_outputs} or outputs
        trust_labels = trust_labels or evidence.trust_labels
        metric, reason, cut = evidence.metric, "the metric of the bundle's contract", evidence.metric_cut
        if metric not in METRICS:
            cause = f"{reason} is the function {metric}, which infer does not call"
            return _Judged(metric, tuple(outputs), reason, why_none=cause)
        if not METRICS[metric].labels:
            metric, reason = "", f"{reason}, {metric}, does not use labels"
    try:
        contract = Contract(metric=metric, cut=cut, trust_labels=trust_labels)
        reference = checked_reference(outputs, data.labels, contract, who="the model", coupling=coupling)
        choice = reference.choice
        # Without the metric of a contract, the reason for the choice includes the cut.
        above = f"scores above {choice.cut:g} are class 1" if metric and choice.cut is not None else ""
        reason = "; ".join(filter(None, (reason, above if metric else choice.reason)))
        return _Judged(reference.metric, choice.outputs, reason, reference.value(outputs))
    except PenstockError as error:
        return _Judged(
            metric, why_none=". ".join(filter(None, (error.message, error.hint and f"To fix it: {error.hint}")))
        )
