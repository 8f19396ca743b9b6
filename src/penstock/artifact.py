"""Artifact: one model in one format at one moment of its way from source to bundle. Immutable."""

from __future__ import annotations

import enum
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import InvalidModel, NotFound, Unsupported


class Format(enum.Enum):
    """How a model is written down."""

    ONNX = "onnx"


_BY_SUFFIX = {".onnx": Format.ONNX}


class Step(msgspec.Struct, frozen=True):
    """One entry of provenance: which step made the artifact, with which options, from which digest, and what it measured."""

    name: str
    source_digest: str
    options: dict[str, Any] = {}
    facts: dict[str, Any] = {}


class Artifact(msgspec.Struct, frozen=True):
    """A model's bytes with their digest and provenance.

    ``path`` is where the bytes came from, if they came from a file; ``data`` are the bytes, always in memory, so that a
    sealed or one-file bundle is served without a temporary file.
    """

    data: bytes
    format: Format
    digest: str
    path: Path | None = None
    provenance: tuple[Step, ...] = ()

    @classmethod
    def from_bytes(cls, data: bytes, format: Format = Format.ONNX, provenance: tuple[Step, ...] = ()) -> Artifact:
        return cls(data=data, format=format, digest=sha256(data), provenance=provenance)

    @classmethod
    def from_file(cls, path: str | Path) -> Artifact:
        """Read a model file; the format follows from its suffix. Raises NotFound, Unsupported, InvalidModel."""
        path = Path(path)
        format = _BY_SUFFIX.get(path.suffix.lower())
        if format is None:
            raise Unsupported(
                f"'{path.name}' is not a model file that Penstock reads", f"known suffixes: {', '.join(_BY_SUFFIX)}"
            )
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise NotFound(f"no model file '{path}'", "check the path") from None
        except OSError as error:
            raise InvalidModel(f"cannot read model file '{path}': {error.strerror}") from error
        if not data:
            raise InvalidModel(f"model file '{path}' is empty", "export the model again")
        return cls(data=data, format=format, digest=sha256(data), path=path)

    def derive(self, data: bytes, step: str, options: dict[str, Any], facts: dict[str, Any]) -> Artifact:
        """The artifact that ``step`` made of this one."""
        record = Step(step, self.digest, options, facts)
        return Artifact(data, self.format, sha256(data), provenance=(*self.provenance, record))

    @property
    def size_bytes(self) -> int:
        return len(self.data)


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256: the digest used for every file, artifact and data set."""
    return hashlib.sha256(data).hexdigest()
