"""``penstock share``."""

from __future__ import annotations

import lzma
import zlib
from pathlib import Path
from typing import Annotated

import typer

from penstock.artifact import Artifact, local_path
from penstock.bundle import coded
from penstock.cli import method as shared
from penstock.cli import outcome
from penstock.cli.inspect import make_console
from penstock.errors import AlreadyExists, IntegrityError, InvalidArgument, NotFound, PenstockError
from penstock.offline.compress.sharing.bits import choose_bits
from penstock.offline.compress.sharing.share import MAX_BITS, ShareOptions
from penstock.offline.compress.sharing.share import share as share_weights
from penstock.storage.atomic import write_whole

_LZMA_BYTES = 64 << 20
"""Larger files are not packed by lzma for comparison: it takes a second a MiB."""


def share(
    model: Annotated[
        Path,
        typer.Argument(help="The trained model, an ONNX file; with --decode a coded file.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the ONNX file.", show_default=False)],
    train: shared.Train = None,
    evaluate: shared.Evaluate = None,
    bits: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_BITS, help="2 ** bits values for each matrix product's weights; default 5, 0 leaves them."
        ),
    ] = None,
    conv_bits: Annotated[
        int | None, typer.Option(min=0, max=MAX_BITS, help="The same of convolutions; default 8.")
    ] = None,
    by_sensitivity: Annotated[
        bool, typer.Option("--by-sensitivity", help="Fewest bits of each layer that the answers to --train bear.")
    ] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Train the shared values to answer as the original.")] = False,
    coded_file: Annotated[Path | None, typer.Option("--coded", help="Also write the coded model here.")] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Read a coded file, write the ONNX file in it.")] = False,
    epochs: shared.Epochs = None,
    seed: shared.Seed = 0,
    threads: shared.Threads = 1,
    budget: shared.Budget = "3s",
    force: shared.Force = False,
    json: shared.Json = False,
) -> None:
    """Let the weights of each layer share a few values, so that the model becomes small when it is coded.

    The ONNX file stays as large; --coded writes the codebooks and Huffman codes that it comes down to, and --decode
    makes the very same ONNX file of them. Prune first: zeros cost next to nothing. --tune needs --train and
    `pip install 'penstock\\[torch]'`.

    [bold]Examples[/bold]

      penstock share pruned.onnx --train train.npz --tune --evaluate test.npz -o shared.onnx --coded model.coded

      penstock share model.coded --decode -o model.onnx
    """
    if decode:
        given = {
            "--train": train,
            "--evaluate": evaluate,
            "--bits": bits,
            "--conv-bits": conv_bits,
            "--coded": coded_file,
        }
        shared.refuse(
            {**given, "--by-sensitivity": by_sensitivity, "--tune": tune, "--epochs": epochs}, "a model to share"
        )
        _decode(model, output, force, json)
        return
    if not tune:
        shared.refuse({"--epochs": epochs}, "--tune")
    usual = ShareOptions()
    options = ShareOptions(usual.conv_bits if conv_bits is None else conv_bits, usual.fc_bits if bits is None else bits)
    options.check()
    job = shared.Job(
        model,
        output,
        fitted=train,
        evaluate=evaluate,
        writes=[coded_file],
        trains=tune,
        threads=threads,
        budget=budget,
        force=force,
    )
    if coded_file is not None:
        _check_coded(coded_file, force)
    with job:
        start = job.folded()
        if by_sensitivity:
            data = job.data("--train", "--by-sensitivity")
            options = choose_bits(start, data, share_options=options, on_progress=job.stage("bits"))
        made = share_weights(start, options, job.stage("share"))
        if tune:
            tuning = shared.trained("sharing.centroid_tuning")
            fit = shared.fit_with(tuning.CentroidOptions().fit, epochs, seed, threads)
            data = job.data("--train", "--tune")
            made = tuning.tune_centroids(made, start, data, tuning.CentroidOptions(fit), job.stage("tune"))
        sizes = _sizes({"original": job.plain(), "optimised": start, "shared": made})
    if coded_file is not None:
        write_whole(coded_file, coded.encode(made.data))
        job.notes.append(f"coded model in {coded_file}")
    if not json:
        table = outcome.make_table("KiB", "file", "zlib", "lzma", "coded")
        for name, row in sizes.items():
            table.add_row(name, *(outcome.kib(size) if size else "–" for size in row.values()))
        make_console().print(table)
    report = {
        "command": "share",
        "sizes": sizes,
        "bits": options.bits,
        "coded": str(coded_file) if coded_file else None,
    }
    job.finish(made, ["coded_size"], report, json=json)


def _sizes(models: dict[str, Artifact]) -> dict[str, dict[str, int | None]]:
    """Bytes of each model as it is, packed by general compressors, and coded."""
    return {
        name: {
            "file_bytes": model.size_bytes,
            "zlib_bytes": len(zlib.compress(model.data, 9)),
            "lzma_bytes": len(lzma.compress(model.data)) if model.size_bytes <= _LZMA_BYTES else None,
            "coded_bytes": shared.coded_bytes(model),
        }
        for name, model in models.items()
    }


def _decode(source: Path, output: Path, force: bool, json: bool) -> None:
    shared.check_target(output, [source], force)
    if not local_path(source).exists():
        raise NotFound(f"no coded file '{source}'", "check the path")
    if not source.is_file():
        raise InvalidArgument(f"'{source}' is not a regular file", "name the coded file")
    try:
        data = source.read_bytes()
        made = coded.decode(data)
    except OSError as error:
        raise InvalidArgument(f"cannot read '{source}': {error.strerror or error}", "check the path") from error
    except IntegrityError as error:
        if shared.is_onnx(source):
            raise InvalidArgument(f"'{source}' is an ONNX file already", "use it as it is") from None
        fix = error.hint or "copy it again, or make it again with penstock share --coded"
        raise IntegrityError(f"'{source}': {error.message}", fix) from error
    except PenstockError as error:
        raise type(error)(f"'{source}': {error.message}", error.hint) from error
    write_whole(output, made)
    sizes = {"coded_bytes": len(data), "size_bytes": len(made)}
    if json:
        shared.print_json({"command": "share", "output": str(output), **sizes})
    else:
        make_console().print(
            f"{outcome.kib(len(data))} KiB decoded to {outcome.kib(len(made))} KiB\nwritten  {output}", markup=False
        )


def _check_coded(path: Path, force: bool) -> None:
    """Raise AlreadyExists if something else than a coded model is there."""
    if path.exists() and not force and not shared.begins_with(path, coded.MAGIC):
        raise AlreadyExists(f"'{path}' exists and is not a coded model", "choose another name, or give --force")
