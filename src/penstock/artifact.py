"""Artifact: one model in one format at one moment of its way from source to bundle. Immutable."""

from __future__ import annotations

import enum
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import InvalidModel, NotFound, Unsupported

_CHUNK_BYTES = 1 << 20
"""What is written in one call of the system: threads that want the core wait for its end."""


class Format(enum.Enum):
    """How a model is written down."""

    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"
    EXPORTED_PROGRAM = "exported_program"
    """Of ``torch.export``."""
    OPENVINO_IR = "openvino_ir"
    """An ``.xml`` file, with a ``.bin`` file of the same stem beside it."""
    TFLITE = "tflite"
    PYTHON = "python"
    SAVED_MODEL = "saved_model"
    """TensorFlow's: a folder."""


SUFFIXES = {
    ".onnx": Format.ONNX,
    ".pt": Format.TORCHSCRIPT,
    ".pt2": Format.EXPORTED_PROGRAM,
    ".xml": Format.OPENVINO_IR,
    ".tflite": Format.TFLITE,
    ".py": Format.PYTHON,
}
"""The formats of model files."""
_ADDRESS = re.compile(r"(s3|gs|as|az|abfss?|wasbs?|hdfs|https?|hf):/+", re.IGNORECASE)
"""``Path`` leaves one slash of two."""
_MAX_FILES = 10_000
_LFS = b"version https://git-lfs"


class Step(msgspec.Struct, frozen=True):
    """One entry of provenance: which step made the artifact, with which options, from which digest, and what it measured."""

    name: str
    source_digest: str
    options: dict[str, Any] = {}
    facts: dict[str, Any] = {}


class Artifact(msgspec.Struct, frozen=True):
    """A model's bytes with their digest and provenance.

    ``data`` are the bytes, always in memory, so that a sealed or one-file bundle is served without a temporary file; ``path`` is
    where they came from, if they came from a file. Of a model of several files they are those of the main one, and
    the engine reads the others from its folder.
    """

    data: bytes
    format: Format
    digest: str
    """Of ``data``, or of all files of a model that has several."""
    path: Path | None = None
    provenance: tuple[Step, ...] = ()
    beside_bytes: int = 0
    """Size of the files beside the main one."""

    @classmethod
    def from_bytes(cls, data: bytes, format: Format = Format.ONNX, provenance: tuple[Step, ...] = ()) -> Artifact:
        return cls(data=data, format=format, digest=sha256(data), provenance=provenance)

    @classmethod
    def from_file(cls, path: str | Path) -> Artifact:
        """Read a model file or folder once; a file's format follows from its suffix.

        A folder is a SavedModel, or ``NAME.onnx`` with a ``model.onnx`` and the files in which that keeps its weights.
        Raises NotFound, Unsupported, InvalidModel.
        """
        path = local_path(path)
        main, format = _main_file(path)
        try:
            data = _read(main)
            beside = _files_beside(main, format, path)
            if not beside:
                return cls(data=data, format=format, digest=sha256(data), path=main)
            digests = [(main, len(data), sha256(data)), *(_digest_of(file) for file in beside)]
        except FileNotFoundError:
            raise NotFound(f"no model file '{main}'", "check the path") from None
        except OSError as error:
            raise InvalidModel(f"cannot read model file '{main}': {error.strerror}") from error
        size = sum(size for _, size, _ in digests[1:])
        return cls(data, format, _digest_of_all(main.parent, digests), main, beside_bytes=size)

    def derive(self, data: bytes, step: str, options: dict[str, Any], facts: dict[str, Any]) -> Artifact:
        """The artifact that ``step`` made of this one."""
        record = Step(step, self.digest, options, facts)
        return Artifact(data, self.format, sha256(data), provenance=(*self.provenance, record))

    def in_memory(self) -> int:
        """A descriptor of memory that holds ``data``, for those who load from files or in other processes; the caller's to close."""
        file = os.memfd_create("penstock-model", os.MFD_CLOEXEC)
        try:
            view = memoryview(self.data)
            while view:
                view = view[os.write(file, view[:_CHUNK_BYTES]) :]
        except BaseException:
            os.close(file)
            raise
        return file

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return len(self.data) + self.beside_bytes


def local_path(given: str | Path) -> Path:
    """``given`` as a path on this machine. Raises Unsupported for the address of an object store or of a web server."""
    if address := _ADDRESS.match(str(given)):
        url = f"{address[1]}://{str(given)[address.end() :]}"
        kind = "a URL" if address[1].startswith("http") else "in an object store"
        raise Unsupported(
            f"'{url}' is {kind}: object stores and URLs are not supported yet",
            "sync it to a folder of this machine, e.g. with 'aws s3 sync', 'gcloud storage rsync' or 'curl', and give that path",
        )
    return Path(given)


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256: the digest used for every file, artifact and data set."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> tuple[str, int]:
    """The hexadecimal SHA-256 of a file, read in pieces, and its size in bytes. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell()


def _main_file(path: Path) -> tuple[Path, Format]:
    """The file to begin with, and what it is."""
    if (path / "saved_model.pb").is_file():
        return path / "saved_model.pb", Format.SAVED_MODEL
    format = SUFFIXES.get(path.suffix.lower())
    if path.is_dir() and format is Format.ONNX:
        return path / "model.onnx", format
    if format is None:
        raise Unsupported(
            f"'{path.name}' is not a model file that Penstock reads",
            f"known suffixes: {', '.join(SUFFIXES)}; and folders that hold a saved_model.pb",
        )
    return path, format


def _read(main: Path) -> bytes:
    if main.exists() and not main.is_file():
        raise InvalidModel(f"cannot read model file '{main}': it is no file", "check the path")
    data = main.read_bytes()
    if not data:
        raise InvalidModel(f"model file '{main}' is empty", "export the model again")
    if data.startswith(_LFS):
        raise InvalidModel(f"model file '{main}' is a Git LFS pointer, not the model", "fetch it with 'git lfs pull'")
    return data


def _files_beside(main: Path, format: Format, path: Path) -> list[Path]:
    """The other files of the model that is opened as ``path``, in a stable order."""
    if format is Format.OPENVINO_IR:
        weights = main.with_suffix(".bin")
        return [weights] if weights.is_file() else []
    if path == main:
        return []
    found: list[Path] = []
    for folder, folders, names in os.walk(main.parent):
        folders.sort()
        found += (Path(folder, name) for name in sorted(names))
        if len(found) > _MAX_FILES:
            raise InvalidModel(f"model folder '{path}' holds more than {_MAX_FILES} files", "check the path")
    for file in found:
        if not file.is_file():
            raise InvalidModel(f"'{file.name}' in model folder '{path}' is no file", "leave files and folders only")
    return [file for file in found if file != main]


def _digest_of(file: Path) -> tuple[Path, int, str]:
    digest, size = sha256_of_file(file)
    return file, size, digest


def _digest_of_all(folder: Path, files: Sequence[tuple[Path, int, str]]) -> str:
    lines = (f"{digest}  {file.relative_to(folder).as_posix()}\n" for file, _, digest in files)
    return sha256("".join(lines).encode("utf-8", "surrogateescape"))
