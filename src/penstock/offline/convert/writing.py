"""Writes the result of a conversion. Before the conversion, checks that this will be possible."""

from __future__ import annotations

import filecmp
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.offline.convert.certificate import Certificate, attach
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import read_proto, save, weights_path
from penstock.resources import usable_memory
from penstock.storage.atomic import check_writable, real_path, write_whole

_COPIES = 3
"""A conversion needs memory and temporary space for about this many copies of the source."""


def check_output(output: Path, sources: Iterable[Path]) -> None:
    """Raise InvalidArgument if the ONNX file ``output`` would overwrite a source, or cannot be written."""
    if output.suffix.lower() != ".onnx":
        raise InvalidArgument(f"the name of an ONNX file must end in .onnx, got '{output}'", "name it NAME.onnx")
    if real_path(output) in set(map(real_path, sources)):
        raise InvalidArgument(f"'{output}' is the source and cannot be overwritten", "choose another name")
    check_writable(output)


def check_companions(companions: Iterable[Path], output: Path) -> None:
    """Raise InvalidArgument if one of ``companions`` would replace a file with other content beside ``output``."""
    for file in companions:
        target = output.parent / file.name
        if target.exists() and not (target.is_file() and filecmp.cmp(file, target, shallow=False)):
            raise InvalidArgument(
                f"'{target}' exists, and differs from the file that belongs to the model",
                "remove it, or choose another folder for the output",
            )


def write_companions(companions: Iterable[Path], output: Path) -> tuple[Path, ...]:
    """Copy ``companions`` to the folder of ``output``. Returns the paths there."""
    targets = []
    for file in companions:
        target = output.parent / file.name
        if not target.exists():
            write_whole(target, file.read_bytes())
        targets.append(target)
    return tuple(targets)


def check_room(size_bytes: int, output: Path | None) -> None:
    """Raise ResourceExhausted if memory or a disk is too small for the source."""
    needed, memory = _COPIES * size_bytes, usable_memory()
    if memory and needed > memory:
        raise ResourceExhausted(
            f"the source has {_gib(size_bytes)}, so converting it needs about {_gib(needed)} of memory; this process may use "
            f"{_gib(memory)}",
            "convert it on a larger machine",
        )
    folders = [(Path(tempfile.gettempdir()), needed, "set TMPDIR to a larger disk")]
    if output is not None:
        parent = next(folder for folder in real_path(output).parents if folder.exists())
        folders.append((parent, size_bytes, "choose another place for the output"))
    for folder, bytes_needed, hint in folders:
        if bytes_needed > (free := shutil.disk_usage(folder).free):
            raise ResourceExhausted(
                f"converting needs about {_gib(bytes_needed)} in '{folder}', which has {_gib(free)} free", hint
            )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"


def kept(artifact: Artifact) -> Artifact:
    """``artifact`` in memory or, if it is too large for that, in a folder that lives as long as the result."""
    return artifact_of(read_proto(artifact)) if artifact.beside else msgspec.structs.replace(artifact, path=None)


def write(artifact: Artifact, certificate: Certificate | None, output: Path) -> Artifact:
    """Write the model atomically. Its weights are written first, so that a written model is complete."""
    if artifact.beside:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".", suffix=".partial") as partial:
            save(artifact, Path(partial, output.name))
            named = Artifact.from_file(Path(partial, output.name))
            data = attach(named, certificate).data if certificate else named.data
            os.replace(weights_path(Path(partial, output.name)), weights_path(output))
    else:
        data = attach(artifact, certificate).data if certificate else artifact.data
    write_whole(output, data)
    return Artifact.from_file(output)
