"""``penstock inspect``: show the contents and the evidence of a bundle, or what a model file contains and needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from penstock.artifact import Format, format_of, local_path
from penstock.bundle.evidence import CandidateRecord, Evidence
from penstock.bundle.manifest import Manifest, PipelineManifest
from penstock.bundle.open import Bundle, as_model, is_bundle, read_bundle
from penstock.bundle.pipeline import PipelineBundle
from penstock.bundle.titles import outcome, steps_title, title, variant_title, verdict
from penstock.cli import options
from penstock.cli.flags.sources import is_source, runnable
from penstock.cli.views.sizes import show_sizes
from penstock.cli.views.tables import make_console, print_table, specs_text
from penstock.engines.registry import is_available
from penstock.errors import AlreadyExists, InvalidArgument
from penstock.inputs.meanings import meanings_of
from penstock.perf.report import write_report
from penstock.resources import machine_facts
from penstock.storage.atomic import check_writable, real_path

_STYLES = {"chosen": "bold green", "rejected": "red", "failed": "red", "baseline": "bold"}


def inspect(
    bundle: Annotated[
        Path,
        typer.Argument(
            help="A bundle, or a model: ONNX, OpenVINO, TensorFlow Lite, TorchScript, exported program, SavedModel, or any source of"
            " `penstock convert`.",
            show_default=False,
        ),
    ],
    report: Annotated[Path | None, typer.Option(help="Also write the build's HTML report to this path.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every candidate, not only the best of each kind.")
    ] = False,
    parents: options.Parents = False,
    template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="Write an npz file with a few plausible rows for the model's inputs. Replace them with your data.",
        ),
    ] = None,
    cuts: Annotated[
        bool, typer.Option("--cuts", help="List the tensors at which `penstock split` can cut the model.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the facts as one JSON object.")] = False,
) -> None:
    """Show a bundle's models, measurements, and rejected candidates with reasons. Verifies every digest.

    For the bundle of a pipeline, show its inputs, steps, conditions, outputs, models, labels and code.

    For a model, show its inputs and what they seem to mean, its operators, size and memory, the engines that run it, what INT8 would
    change, whether requests to it can be merged, and the command to type next.

    [bold]Examples[/bold]

      penstock inspect digits.bundle

      penstock inspect digits.bundle --report report.html

      penstock inspect digits.onnx --template samples.npz
    """
    options.check_folders([report], parents)
    path = local_path(bundle)
    if cuts:
        _inspect_cuts(path, report, template, json)
        return
    if template is not None:
        _check_template(template)
    if not is_bundle(path) and (format_of(path) is not None or is_source(path)):
        _inspect_model(path, report, template, json)
        return
    contents = read_bundle(bundle)
    if isinstance(contents.manifest, PipelineManifest):
        _refuse_files(f"'{path}' contains a pipeline, which has no measurements", report, template)
        _inspect_pipeline(PipelineBundle(contents, contents.manifest), json)
        return
    opened = as_model(contents)
    if template is not None:
        _write_template(opened, template)
    if report is not None:
        if real_path(report).is_relative_to(real_path(bundle)):
            raise InvalidArgument(f"the report '{report}' cannot be inside the bundle", "choose another path")
        write_report(report, opened.manifest, bundle=str(bundle))
    if json:
        facts = {
            "digest": opened.digest,
            "differences": opened.differences(machine_facts()),
            "inputs": {name: one.text for name, one in meanings_of(opened.manifest.signature).items()},
            "manifest": opened.manifest,
            "titles": _titles(opened.manifest.evidence),
        }
        print(msgspec.json.encode(facts).decode())
        return
    console = make_console()
    show(console, opened.manifest, sum(entry.size_bytes for entry in opened.manifest.files), everything)
    for name, meaning in meanings_of(opened.manifest.signature).items():
        console.print(f"input   {escape(f'{name}: {meaning.text}')}")
    console.print(f"digest  sha256:{opened.digest}, verified")
    for difference in opened.differences(machine_facts()):
        console.print(f"[yellow]note[/yellow]    {escape(difference)}; build again on this machine for valid figures")
    if report is not None:
        console.print(f"report  {escape(str(report))}")


def _refuse_files(reason: str, report: Path | None, template: Path | None) -> None:
    if report is not None or template is not None:
        raise InvalidArgument(reason, "remove --report and --template")


def _inspect_pipeline(opened: PipelineBundle, json: bool) -> None:
    from penstock.cli.views import pipeline  # noqa: PLC0415 - takes long, and other bundles do not need it

    if json:
        print(msgspec.json.encode(pipeline.facts_of(opened)).decode())
    else:
        pipeline.show(make_console(), opened)


def _inspect_cuts(path: Path, report: Path | None, template: Path | None, json: bool) -> None:
    from penstock.cli.views.cuts import show_cuts  # noqa: PLC0415 - takes long, and is rarely needed

    _refuse_files("--cuts writes no file", report, template)
    if is_bundle(path):
        raise InvalidArgument(f"'{path}' is a bundle, which cannot be split", "name the model that it was made from")
    show_cuts(make_console(), path, json=json)


def _inspect_model(path: Path, report: Path | None, template: Path | None, json: bool) -> None:
    from penstock.cli.views import model  # noqa: PLC0415 - takes long, and bundles do not need it

    if report is not None:
        raise InvalidArgument(f"'{path}' is a model, which has no report", "remove --report, or name a bundle")
    model.inspect_model(make_console(), runnable(path), template, str(path), json=json)


def _write_template(opened: Bundle, target: Path) -> None:
    from penstock.cli.views import model  # noqa: PLC0415 - takes long, and is rarely needed

    model.write_template(opened.artifact(opened.choose(machine_facts(), is_available)), target)


def _check_template(target: Path) -> None:
    """Raise an error before any work if the template cannot be written, or would overwrite a file."""
    if target.suffix != ".npz":
        raise InvalidArgument(
            f"the template '{target}' is not named like an npz file", "choose a name that ends in .npz"
        )
    if target.exists():
        raise AlreadyExists(f"'{target}' exists", "choose another name for the template, or remove the file")
    check_writable(target)


def show(console: Console, manifest: Manifest, size_bytes: int, everything: bool = False) -> None:
    """Print a manifest as text and tables."""
    serving = manifest.serving
    console.print(
        f"[bold]{escape(manifest.name)}[/bold]  "
        + escape(f"{specs_text(manifest.signature.inputs)} → {specs_text(manifest.signature.outputs)}")
    )
    served = variant_title(serving.variant, manifest.evidence)
    console.print(
        f"served as {escape(served)}: {serving.instances} instance(s) × {serving.threads} thread(s), "
        f"batches up to {serving.max_batch}; {size_bytes / 1024:.0f} KiB with {len(manifest.variants)} variant(s)"
    )
    source = manifest.source
    made = f", made from {escape(source.file) or 'a model in memory'} (sha256:{source.digest[:16]}…)" if source else ""
    console.print(f"version {manifest.version}{made}")
    for step in manifest.provenance:
        if step.name == "convert":
            made = f"{step.options.get('format')} by {step.options.get('exporter')}; parity {step.facts.get('parity')}"
            console.print(f"converted from {escape(made)}", soft_wrap=True)
    for line in _special(manifest):
        console.print(line)
    evidence = manifest.evidence
    if evidence is None:
        return
    p99 = f", p99 within {evidence.p99_ms:g} ms" if evidence.p99_ms else ""
    rows = f"; timed on calls of {evidence.rows_per_call} rows" if evidence.rows_per_call > 1 else ""
    console.print(f"contract: {escape(evidence.contract)}{p99}{rows}")
    console.print(_optimization(evidence))
    console.print(_verdict(evidence))
    _show_candidates(console, evidence, everything)
    if not everything:
        console.print(
            f"Penstock tried {evidence.tried.rstrip(',')}; `penstock inspect --all` and the report show every one"
        )
    show_sizes(console, evidence.by_size)
    if evidence.attempts:
        _show_attempts(console, evidence)
    machine = manifest.machine
    console.print(f"measured on {escape(machine.cpu)}, {machine.cores} core(s), {' '.join(machine.isa)}")
    for note in evidence.notes:
        console.print(f"note    {escape(note)}")


def _special(manifest: Manifest) -> Iterator[str]:
    """A line for each variant that is not stored as one ONNX file."""
    stored = {entry.path: entry.size_bytes for entry in manifest.files}
    for one in manifest.variants:
        size = sum(stored[path] for path in one.paths) / 1024
        if one.coding:
            yield f"{escape(one.name)} is coded in {size:.1f} KiB, {one.decoded_bytes / 1024:.1f} KiB after loading"
        elif one.beside or one.format is not Format.ONNX:
            yield f"{escape(one.name)} is stored as {one.format.value} in {len(one.paths)} file(s), {size:.1f} KiB"


def _verdict(evidence: Evidence) -> str:
    """The speed-up and the loss of the chosen candidate, with 95 % intervals."""
    before, chosen = evidence.baseline, evidence.candidate(evidence.chosen)
    parts = [f"size {_kib(before.disk_bytes)} → {_kib(chosen.disk_bytes)} KiB"]
    if evidence.conditions.dirty:
        parts.insert(0, f"[yellow]measured on a busy machine ({evidence.conditions.disturbance})[/yellow]")
    if chosen.speedup is not None:
        speed = chosen.speedup
        parts.insert(0, f"{speed.value:.2f}x the original's speed (95 %: {speed.low:.2f} … {speed.high:.2f})")
    if chosen.accuracy is not None:
        metric, loss = chosen.accuracy.metric, chosen.accuracy.loss
        parts.append(
            f"{metric} {chosen.accuracy.shown}, loss {loss.value:+.2%} (95 %: {loss.low:+.2%} … {loss.high:+.2%}; "
            f"{chosen.accuracy.samples} samples)"
        )
    return f"chosen: {escape(title(chosen))}: " + "; ".join(parts)


def _titles(evidence: Evidence | None) -> dict[str, dict[str, str]]:
    """Title and outcome of each candidate, by name."""
    records = (evidence.baseline, *evidence.candidates) if evidence is not None else ()
    return {record.name: {"title": title(record), "outcome": outcome(record)} for record in records}


def _show_candidates(console: Console, evidence: Evidence, everything: bool) -> None:
    """Print the original, then the candidates by speed. Without ``everything``, only the best of each engine, precision and status."""
    ranked = sorted(evidence.candidates, key=lambda record: record.latency_ms or float("inf"))
    shown, seen = [], set()
    for record in (evidence.baseline, *ranked):
        kind = (record.engine, record.precision, record.status)
        if everything or kind not in seen:
            shown.append(record)
        seen.add(kind)
    titles = ("candidate", "p50 ms", "p99 ms", "speed", "accuracy", "loss", "KiB", "verdict")
    styles = [_STYLES.get(record.status, "") for record in shown]
    minor = ("p50 ms", "accuracy", "KiB", "p99 ms")
    print_table(console, titles, [_cells(one) for one in shown], texts=("verdict",), minor=minor, styles=styles)


def _cells(record: CandidateRecord) -> list[str]:
    speed, accuracy = record.speedup, record.accuracy
    return [
        title(record),
        f"{record.latency_ms:.3f}" if record.latency_ms is not None else "–",
        f"{record.p99_ms:.3f}" if record.p99_ms is not None else "–",
        f"{speed.value:.2f}x" if speed else "",
        accuracy.shown if accuracy else "–",
        f"{accuracy.loss.value:+.2%}" if accuracy else "",
        _kib(record.disk_bytes),
        verdict(record),
    ]


def _show_attempts(console: Console, evidence: Evidence) -> None:
    """Print the attempts of a compression plan, in order."""
    titles = ("step", "after", "speed", "loss", "KiB", "s", "verdict")
    rows = [
        (
            steps_title(attempt.name),
            steps_title(attempt.parent),
            f"{attempt.speedup.value:.2f}x" if attempt.speedup else "–",
            f"{attempt.accuracy.loss.value:+.2%}" if attempt.accuracy else "–",
            _kib(attempt.stored_bytes or attempt.size_bytes) if attempt.size_bytes else "–",
            f"{attempt.seconds:.0f}",
            f"{attempt.outcome}: {attempt.reason}",
        )
        for attempt in evidence.attempts
    ]
    styles = ["" if attempt.outcome == "kept" else "dim" for attempt in evidence.attempts]
    print_table(console, titles, rows, texts=("after", "verdict"), minor=("s", "KiB"), styles=styles)


def _kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:.{0 if size_bytes >= 100 << 10 else 1}f}"


def _optimization(evidence: Evidence) -> str:
    before, after = evidence.optimization.get("nodes_before"), evidence.optimization.get("nodes_after")
    if before is None:
        return "graph: not optimised"
    optimized = evidence.optimized
    if optimized is None:
        return f"graph: {before} nodes, {after} after the passes"
    return (
        f"graph: {before} nodes in {evidence.baseline.latency_ms:.3f} ms, {after} after the passes in "
        f"{optimized.latency_ms:.3f} ms (FP32, {optimized.threads} thread(s))"
    )
