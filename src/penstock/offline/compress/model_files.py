"""Checks of the files that methods read and write. Errors name the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from penstock.artifact import Artifact
from penstock.bundle import coded
from penstock.errors import AlreadyExists, InvalidArgument, InvalidModel, Unsupported
from penstock.offline.convert.cached import read_model
from penstock.offline.optimize.model import read_proto
from penstock.perf.report import check_report_target
from penstock.storage.atomic import check_writable, real_path

_MAGICS = {"picture": b"<svg", "coded model": coded.MAGIC}


def read_model_file(path: Path, role: str = "model") -> Artifact:
    """The ONNX file ``path``, or the ONNX model made from another source, checked.

    Raises NotFound, InvalidModel, Unsupported, with the file and its ``role`` in the message, and the errors of a conversion.
    """
    if begins_with(path, coded.MAGIC):
        fix = f"decode it first: penstock share {path} --decode -o {path.stem}.onnx"
        raise InvalidModel(f"{role} '{path}' is a coded model, not an ONNX file", fix)
    made = read_model(path)
    with naming(path, role):
        read_proto(made)
    return made


@contextlib.contextmanager
def naming(path: Path | None, role: str = "model") -> Iterator[None]:
    """Prefix errors about a model with the name of its file."""
    try:
        yield
    except (InvalidModel, Unsupported) as error:
        if path is None:
            raise
        raise type(error)(f"{role} '{path}': {error.message}", error.hint) from error


def check_target(path: Path, inputs: Sequence[Path], force: bool) -> None:
    """Raise InvalidArgument or AlreadyExists if an ONNX file must not be written to ``path``."""
    if path.suffix.lower() != ".onnx":
        raise InvalidArgument(f"the name of an ONNX file must end in .onnx, got '{path}'", "name it NAME.onnx")
    check_place(path, inputs)
    if path.exists() and not force and not is_onnx(path):
        raise AlreadyExists(f"'{path}' exists and is not an ONNX file", "choose another name, or use --force")


def check_place(path: Path, others: Sequence[Path]) -> None:
    """Raise InvalidArgument if ``path`` is one of ``others`` or is not writable."""
    if any(real_path(other) == real_path(path) for other in others):
        raise InvalidArgument(f"'{path}' would overwrite another file of this command", "choose another name")
    check_writable(path)


def check_kind(path: Path, kind: str, force: bool) -> None:
    """Raise AlreadyExists if ``path`` exists and is not a ``kind`` (picture, coded model or report)."""
    if kind == "report":
        check_report_target(path)
    elif path.exists() and not force and not begins_with(path, _MAGICS[kind]):
        raise AlreadyExists(f"'{path}' exists and is not a {kind}", f"choose another name for the {kind}")


def begins_with(path: Path, magic: bytes) -> bool:
    """True if ``path`` is a readable regular file that begins with ``magic``."""
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(magic)) == magic
    return False


def is_onnx(path: Path) -> bool:
    """True if the file ``path`` is an ONNX model."""
    try:
        return bool(onnx.load(path, load_external_data=False).HasField("graph"))
    except (DecodeError, OSError, ValueError):
        return False
