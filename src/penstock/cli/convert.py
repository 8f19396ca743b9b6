"""``penstock convert``: convert a model of any framework to ONNX, and prove that its outputs are the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape

from penstock.cli import options
from penstock.cli.flags.operators import Ops
from penstock.cli.interrupts import terminating_cleanly
from penstock.cli.pipelines.beside import Beside, write_beside
from penstock.cli.views.model import certificate_lines
from penstock.cli.views.progress import StageProgress
from penstock.cli.views.tables import make_console
from penstock.errors import InvalidArgument
from penstock.offline.compress.model_files import check_target
from penstock.offline.convert.base import UnsupportedOperators
from penstock.offline.convert.certificate import Certificate
from penstock.offline.convert.convert import Conversion, ConvertKeywords, ParityFailed
from penstock.offline.convert.convert import convert as convert_source
from penstock.offline.convert.registry import FORMATS
from penstock.samples.user_code import apart_from_output
from penstock.tensor import TensorSpec

_NO_PIPELINE = Beside()


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="The model: a file, a folder (SavedModel, Hugging Face, Paddle), or package.module:function for a function that"
            " returns a PyTorch module, an estimator or a JAX function. Caffe: the .prototxt file.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Path of the ONNX file.", show_default=False)],
    format: Annotated[
        str,
        typer.Option(
            "--from", metavar="FORMAT", help=f"Format of the source, if it is not detected: {', '.join(FORMATS)}."
        ),
    ] = "",
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DECLARATION",
            help="Name, type and shape of an input, e.g. 'image:float32[N,3,224,224]'; a name in place of a size makes the dimension"
            " free. May be repeated, once for each input.",
        ),
    ] = None,
    sample: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="Inputs of one call, in place of --inputs; they are also compared. An npz file with one array for each input.",
        ),
    ] = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INPUT:AXIS=NAME,...",
            help="Free dimensions of an input, e.g. image:0=batch,2=height,3=width. May be repeated, once for each input.",
        ),
    ] = None,
    opset: Annotated[int, typer.Option(help="Version of ONNX's operators.")] = 21,
    outputs: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Keep only this output; may be repeated.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="File with the weights: a .caffemodel, or a .safetensors or state_dict file for the module that the function makes."
        ),
    ] = None,
    signature: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Signature of a SavedModel. Default: serving_default, or the first one."),
    ] = None,
    trust_pickle: Annotated[
        bool,
        typer.Option(
            "--trust-pickle",
            help="Load pickles and other formats that can run code. They are scanned first, and only known names are loaded.",
        ),
    ] = False,
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated",
            help="Convert in an environment that has only the framework's packages. It is made on first use (downloads packages)"
            " and kept.",
        ),
    ] = False,
    ops: Ops = None,
    keep_failed: Annotated[
        bool, typer.Option("--keep-failed", help="Write the ONNX file even if its outputs differ from the source's.")
    ] = False,
    parents: options.Parents = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a target that is not an ONNX file.")] = False,
    json: options.Json = False,
) -> None:
    """Convert a model of any framework to ONNX, and prove that its outputs did not change.

    The command runs the source and the ONNX model on the same inputs: of several sizes, with extreme values, and on --sample. The
    tolerance follows from the rounding errors of the model itself. If the outputs differ, the command names the first node that
    differs, and writes no file. Otherwise, the file contains a certificate, which `penstock inspect` shows.

    Nothing that can run code is loaded without --trust-pickle. Files are loaded in a process that has no network and can write
    only in its own folder.
    All other commands take the same sources, and convert them first. `penstock build net.pt2 ...` does both steps.

    [bold]Examples[/bold]

      penstock convert model.keras -o model.onnx

      penstock convert net.pt --inputs 'image:float32\\[N,3,224,224]' -o net.onnx

      penstock convert package.module:make_model --weights net.safetensors --sample one.npz --dynamic image:0=batch -o net.onnx

      penstock convert pipeline.skops -o pipeline.onnx --json
    """
    if signature is not None and not signature:
        raise InvalidArgument("--signature is empty", "give the name of a signature, or leave it out")
    options.check_folders([output], parents)
    check_target(output, [path for path in (Path(source), sample, weights, ops) if path is not None], force)
    keywords = ConvertKeywords(
        format=format,
        inputs=inputs or (),
        dynamic=dynamic or (),
        opset=opset,
        outputs=outputs or (),
        signature=signature or "",
        trust_pickle=trust_pickle,
        isolated=isolated,
        keep_failed=keep_failed,
    )
    for name, path in (("sample", sample), ("weights", weights), ("ops", ops)):
        if path is not None:
            keywords[name] = path  # type: ignore[literal-required]
    try:
        # What frameworks print on stdout goes to stderr, so that stdout has only the result.
        with terminating_cleanly(), StageProgress() as progress, apart_from_output():
            done = convert_source(source, output, progress, **keywords)
    except ParityFailed as error:
        error.facts = report(error.conversion) if error.conversion else {}
        raise
    except UnsupportedOperators as error:
        error.facts = {"unsupported": msgspec.to_builtins(error.operators)}
        _show_unsupported(error)
        raise
    if done.certificate is not None and not done.certificate.holds:
        failed = ParityFailed(
            f"'{output}' was written, but its outputs differ from the source's", "use it only to look for the cause"
        )
        failed.facts = report(done)
        if not json:
            show(done)
        raise failed
    pipeline = write_beside(done) if done.format == "huggingface" and done.output is not None else Beside()
    if json:
        print(msgspec.json.encode(report(done, pipeline)).decode())
    else:
        show(done, pipeline)


def report(done: Conversion, pipeline: Beside = _NO_PIPELINE) -> dict[str, Any]:
    """The stable JSON form of a conversion, for scripts."""
    return {
        "output": str(done.output) if done.output else None,
        "format": done.format,
        "converter": done.exporter,
        "opset": done.opset,
        "inputs": msgspec.to_builtins(done.signature.inputs),
        "outputs": msgspec.to_builtins(done.signature.outputs),
        "parity": parity(done.certificate) if done.certificate else None,
        "unsupported": [],
        "pipeline": str(pipeline.files[0]) if pipeline.files else None,
        "warnings": done.warnings,
    }


def parity(certificate: Certificate) -> dict[str, Any]:
    """What ``certificate`` says about the comparison, as plain data."""
    names = (
        "holds",
        "cases",
        "max_error",
        "tolerance",
        "first_divergent",
        "not_compared",
        "not_proved",
        "proved",
        "notes",
    )
    return {name: msgspec.to_builtins(getattr(certificate, name)) for name in names}


def show(done: Conversion, pipeline: Beside = _NO_PIPELINE) -> None:
    """Print the result as text."""
    console = make_console()
    title = FORMATS[done.format].title if done.format in FORMATS else done.format
    made = f"opset {done.opset}, from {title} by {done.exporter}, {done.artifact.size_bytes / 1024:.1f} KiB"
    console.print(f"[bold]{escape(str(done.output))}[/bold]  {escape(made)}", soft_wrap=True)
    axes = done.axes
    for name, specs in (("input", done.signature.inputs), ("output", done.signature.outputs)):
        for spec in specs:
            console.print(f"{name:<9} {escape(_spec(spec, axes.get(spec.name, ())))}", soft_wrap=True)
    if done.certificate is not None:
        for title, text in certificate_lines(done.certificate):
            console.print(f"{title:<9} {escape(text)}", soft_wrap=True)
    if done.companions:
        console.print(f"{'beside':<9} {escape(', '.join(file.name for file in done.companions))}", soft_wrap=True)
    if pipeline.files:
        written = ", ".join(file.name for file in pipeline.files)
        console.print(f"{'pipeline':<9} {escape(written)}; check the lines with CHECK, then", soft_wrap=True)
    elif pipeline.reason:
        console.print(f"{'note':<9} no pipeline.yaml was written: {escape(pipeline.reason)}", soft_wrap=True)
    for warning in done.warnings:
        console.print(f"[yellow]warning[/yellow]   {escape(warning)}", soft_wrap=True)
    pack = f"penstock pack {pipeline.files[0]} -o {Path(str(done.output)).stem}.bundle" if pipeline.files else ""
    console.print(f"{'next':<9} {escape(pack or f'penstock inspect {done.output}')}", soft_wrap=True)


def _spec(spec: TensorSpec, names: Sequence[str]) -> str:
    shown = names if len(names) == len(spec.shape) else [""] * len(spec.shape)
    shape = ", ".join(name or "?" if size < 0 else str(size) for size, name in zip(spec.shape, shown, strict=True))
    return f"{spec.name}  {spec.datatype.value}[{shape}]"


def _show_unsupported(error: UnsupportedOperators) -> None:
    for one in error.operators:
        print(f"unsupported: {one.op}{one.where and f' at {one.where}'}: {one.way_out}", file=sys.stderr)
