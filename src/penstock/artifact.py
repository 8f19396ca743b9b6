"""Artifact: the files of one model at one step between the source model and the bundle. Immutable."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from penstock.errors import InvalidModel, NotFound, ResourceExhausted, Unsupported
from penstock.protocol.onnx_scan import external_files

_CHUNK_BYTES = 1 << 20
"""Number of bytes to hash in one call. Calls must be short, because other threads on the same core wait until a call ends."""


class Format(enum.Enum):
    """The file format of a model."""

    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"
    EXPORTED_PROGRAM = "exported_program"
    """Program written by ``torch.export``."""
    OPENVINO_IR = "openvino_ir"
    """An ``.xml`` file, and a ``.bin`` file with the same stem in the same folder."""
    TFLITE = "tflite"
    PYTHON = "python"
    SAVED_MODEL = "saved_model"
    """Folder written by TensorFlow."""


SUFFIXES = {
    ".onnx": Format.ONNX,
    ".pt": Format.TORCHSCRIPT,
    ".pt2": Format.EXPORTED_PROGRAM,
    ".xml": Format.OPENVINO_IR,
    ".tflite": Format.TFLITE,
    ".py": Format.PYTHON,
}
"""The formats of model files. All commands and the server read models by this table."""
TITLES = {
    Format.ONNX: "ONNX",
    Format.TORCHSCRIPT: "TorchScript",
    Format.EXPORTED_PROGRAM: "exported program",
    Format.OPENVINO_IR: "OpenVINO IR",
    Format.TFLITE: "TensorFlow Lite",
    Format.PYTHON: "Python",
    Format.SAVED_MODEL: "SavedModel",
}
"""The name of each format in texts for people."""
_DEFAULT_NAMES = {format: f"model{suffix}" for suffix, format in SUFFIXES.items()} | {
    Format.SAVED_MODEL: "saved_model.pb"
}
_ADDRESS = re.compile(r"(s3|gs|as|az|abfss?|wasbs?|hdfs|https?|hf):/+", re.IGNORECASE)
"""One slash after the scheme suffices, because ``Path`` merges two slashes into one."""
_MAX_FILES = 10_000
_LFS = b"version https://git-lfs"


class ProvenanceStep(msgspec.Struct, frozen=True):
    """One entry of the provenance: the step that made the artifact, its options, the digest of the source, and measurements."""

    name: str
    source_digest: str
    options: dict[str, Any] = {}
    facts: dict[str, Any] = {}


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a model or a bundle; ``path`` is relative, with forward slashes."""

    path: str
    size_bytes: int
    sha256: str


class Artifact(msgspec.Struct, frozen=True):
    """A model's files with their digest and provenance.

    The main file is always in memory. The other files stay on disk if the model was read from a path. Otherwise, ``contents`` holds
    the other files, so that a bundle in one file can be served without unpacking it.
    """

    data: bytes
    """The main file."""
    format: Format
    digest: str
    """SHA-256 of ``data`` if the model is one file, otherwise of the list of its files."""
    path: Path | None = None
    """The main file on disk; None if the model is only in memory."""
    provenance: tuple[ProvenanceStep, ...] = ()
    name: str = ""
    """File name of the main file; empty for the format's default."""
    beside: tuple[FileEntry, ...] = ()
    """The other files, by their path from the main file's folder."""
    contents: Mapping[str, bytes] = {}
    """Content of the files in ``beside``, by path; empty if ``path`` is given."""
    source: Artifact | None = None
    """The artifact from which ``derive`` made this artifact. Comparing and pickling ignore this field."""
    keeps: object = None
    """Object that lives as long as the artifact, such as the temporary folder with its files. Ignored like ``source``."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Artifact) and self._value() == other._value()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[Artifact], tuple[object, ...]]:
        return Artifact, self._value()

    def _value(self) -> tuple[object, ...]:
        return self.data, self.format, self.digest, self.path, self.provenance, self.name, self.beside, self.contents

    @classmethod
    def from_bytes(
        cls, data: bytes, format: Format = Format.ONNX, provenance: tuple[ProvenanceStep, ...] = ()
    ) -> Artifact:
        return cls(data=data, format=format, digest=sha256(data), provenance=provenance)

    @classmethod
    def from_files(
        cls, name: str, files: Mapping[str, bytes], format: Format, provenance: tuple[ProvenanceStep, ...] = ()
    ) -> Artifact:
        """Create a model in memory. The keys of ``files`` are paths relative to the folder of the main file ``name``."""
        contents = {path: data for path, data in files.items() if path != name}
        beside = file_entries(contents)
        digest = digest_of_all(name, sha256(files[name]), beside)
        return cls(files[name], format, digest, None, provenance, name, beside, contents)

    @classmethod
    def from_file(cls, path: str | Path) -> Artifact:
        """Read a model file or folder. A file's suffix determines the format.

        A folder is a SavedModel, or a folder ``NAME.onnx`` that contains ``model.onnx`` and the files with its weights. Raises
        NotFound, Unsupported, InvalidModel.
        """
        path = local_path(path)
        main, format = _main_file(path)
        try:
            data = _read(main)
            beside = tuple(_entry_of(file, main.parent) for file in _files_beside(main, data, format, path))
        except FileNotFoundError:
            raise NotFound(f"no model file '{main}'", "check the path") from None
        except OSError as error:
            raise InvalidModel(f"cannot read model file '{main}': {error.strerror}") from error
        digest = digest_of_all(main.name, sha256(data), beside)
        return cls(data, format, digest, main, name=main.name, beside=beside)

    def derive(self, made: bytes | Artifact, step: str, options: dict[str, Any], facts: dict[str, Any]) -> Artifact:
        """Create the artifact that ``step`` produces from this artifact, with the files of ``made``."""
        if isinstance(made, bytes) or not made.beside:
            made = Artifact.from_bytes(made if isinstance(made, bytes) else made.data, self.format)
        record = ProvenanceStep(step, self.digest, options, facts)
        return msgspec.structs.replace(made, provenance=(*self.provenance, record), source=self)

    def files(self) -> dict[str, bytes]:
        """All files by path, relative to the main file's folder. The main file comes first. Raises InvalidModel if a file has
        changed.
        """
        found = {self.file_name: self.data}
        for entry in self.beside:
            try:
                data = self.contents[entry.path] if self.path is None else (self.path.parent / entry.path).read_bytes()
            except OSError as error:
                raise InvalidModel(f"cannot read '{entry.path}' of the model: {error.strerror}") from error
            if sha256(data) != entry.sha256:
                raise InvalidModel(f"'{entry.path}' changed while the model was read", "try again when it is complete")
            found[entry.path] = data
        return found

    @contextlib.contextmanager
    def on_disk(self) -> Iterator[Path | None]:
        """Context manager that yields the main file's path, with the other files beside it. Yields None for a model that is a single
        file in memory.

        A model in memory with several files is written to a private temporary folder. Raises ResourceExhausted.
        """
        if self.path is not None or not self.beside:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="penstock-artifact-", ignore_cleanup_errors=True) as folder:
            try:
                for path, data in self.files().items():
                    file = Path(folder, path)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(data)
            except OSError as error:
                raise ResourceExhausted(
                    f"cannot write the model's files to '{folder}': {error.strerror}", "free some space, or set TMPDIR"
                ) from error
            yield Path(folder, self.file_name)

    def in_memory(self) -> int:
        """Write ``data`` and then ``contents`` to an in-memory file, and return its file descriptor. Child processes can inherit it,
        and engines can load it as a file. The caller must close it.
        """
        file = os.memfd_create("penstock-model", os.MFD_CLOEXEC)
        try:
            for data in (self.data, *(self.contents[entry.path] for entry in self.beside if self.contents)):
                view = memoryview(data)
                while view:
                    view = view[os.write(file, view[:_CHUNK_BYTES]) :]
        except BaseException:
            os.close(file)
            raise
        return file

    @property
    def file_name(self) -> str:
        """The main file's name."""
        return self.name or _DEFAULT_NAMES[self.format]

    @property
    def size_bytes(self) -> int:
        """The total size of all files, in bytes."""
        return len(self.data) + sum(entry.size_bytes for entry in self.beside)


def local_path(given: str | Path) -> Path:
    """Convert ``given`` to a path. Raises Unsupported for URLs and for addresses of object stores."""
    if address := _ADDRESS.match(str(given)):
        url = f"{address[1]}://{str(given)[address.end() :]}"
        kind = "a URL" if address[1].startswith("http") else "in an object store"
        raise Unsupported(
            f"'{url}' is {kind}: object stores and URLs are not supported yet",
            "copy it to a folder on this machine, e.g. with 'aws s3 sync', 'gcloud storage rsync' or 'curl', and use that path",
        )
    return Path(given)


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256, the digest of files, artifacts and data sets."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> tuple[str, int]:
    """The hexadecimal SHA-256 of a file, read in pieces, and its size in bytes. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell()


def file_entries(files: Mapping[str, bytes]) -> tuple[FileEntry, ...]:
    """Path, size and digest of each file in ``files`` (relative path -> content), sorted by path."""
    return tuple(FileEntry(path, len(data), sha256(data)) for path, data in sorted(files.items()))


def format_of(path: Path) -> Format | None:
    """The format of the model at ``path``, determined by its name or, for a SavedModel, its main file; None if unknown."""
    if (path / _DEFAULT_NAMES[Format.SAVED_MODEL]).is_file():
        return Format.SAVED_MODEL
    return SUFFIXES.get(path.suffix.lower())


def listed(formats: Iterable[Format] = Format) -> str:
    """List ``formats`` for people, with the suffix of each: ``ONNX (.onnx), TorchScript (.pt), …``."""
    files = {format: suffix for suffix, format in SUFFIXES.items()}
    files[Format.SAVED_MODEL] = f"folder with {_DEFAULT_NAMES[Format.SAVED_MODEL]}"
    return ", ".join(f"{TITLES[format]} ({files[format]})" for format in formats)


def refuse_declaration(path: Path) -> None:
    """Raise Unsupported if the file ``path`` is the declaration of a pipeline, which can only run as a bundle."""
    if path.suffix.lower() in (".yaml", ".yml", ".toml") and path.is_file():
        hint = f"pack it with `penstock pack {path} -o {path.stem}.bundle`, and use the bundle"
        raise Unsupported(f"'{path.name}' is the declaration of a pipeline, not a bundle or a model", hint)


def _main_file(path: Path) -> tuple[Path, Format]:
    """The main file of ``path``, and the model's format."""
    format = format_of(path)
    if format is None:
        refuse_declaration(path)
        raise Unsupported(
            f"'{path.name}' is not a model file that Penstock reads",
            f"use one of: {listed()}",
        )
    if format is Format.SAVED_MODEL or (path.is_dir() and format is Format.ONNX):
        return path / _DEFAULT_NAMES[format], format
    return path, format


def _read(main: Path) -> bytes:
    if main.exists() and not main.is_file():
        raise InvalidModel(f"cannot read model file '{main}': it is not a file", "check the path")
    data = main.read_bytes()
    if not data:
        raise InvalidModel(f"model file '{main}' is empty", "export the model again")
    if data.startswith(_LFS):
        raise InvalidModel(f"model file '{main}' is a Git LFS pointer, not the model", "fetch it with 'git lfs pull'")
    return data


def _files_beside(main: Path, data: bytes, format: Format, path: Path) -> list[Path]:
    """The other files of the model at ``path``, in a stable order."""
    if format is Format.OPENVINO_IR:
        weights = main.with_suffix(".bin")
        return [weights] if weights.is_file() else []
    if path == main:
        return _external_data(main, data) if format is Format.ONNX else []
    found: list[Path] = []
    for folder, folders, names in os.walk(main.parent):
        folders.sort()
        found += (Path(folder, name) for name in sorted(names))
        if len(found) > _MAX_FILES:
            raise InvalidModel(f"model folder '{path}' contains more than {_MAX_FILES} files", "check the path")
    for file in found:
        if not file.is_file():
            raise InvalidModel(f"'{file.name}' in model folder '{path}' is not a regular file", "remove it")
    return [file for file in found if file != main]


def _external_data(main: Path, data: bytes) -> list[Path]:
    """The files with the weights of the model ``main``, in its folder or below. Missing files, and files outside the folder, are not
    reported here: the engine rejects them.
    """
    with contextlib.suppress(ValueError):  # not an ONNX model; the engine reports this
        names = (PurePosixPath(name) for name in sorted(external_files(data)))
        inside = [main.parent / name for name in names if not name.is_absolute() and ".." not in name.parts]
        return [file for file in dict.fromkeys(inside) if file.is_file()]
    return []


def _entry_of(file: Path, folder: Path) -> FileEntry:
    digest, size = sha256_of_file(file)
    return FileEntry(file.relative_to(folder).as_posix(), size, digest)


def digest_of_all(name: str, digest: str, beside: Sequence[FileEntry]) -> str:
    """The digest of a model, from the name ``name`` and the digest ``digest`` of its main file."""
    if not beside:
        return digest
    lines = (f"{one}  {path}\n" for path, one in ((name, digest), *((entry.path, entry.sha256) for entry in beside)))
    return sha256("".join(lines).encode("utf-8", "surrogateescape"))
