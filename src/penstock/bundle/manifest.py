"""The manifest of a bundle: what is inside, how to serve it, what was measured, and where it came from.

Written as canonical JSON (sorted keys, no white space, UTF-8), so that equal manifests are equal bytes and one digest
names the whole bundle: the manifest holds the digest of every file, and ``Bundle.digest`` is the manifest's own.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.artifact import Step
from penstock.bundle.evidence import Evidence, LatencyPoint
from penstock.errors import IntegrityError, InvalidArgument, Unsupported
from penstock.resources import MachineFacts
from penstock.tensor import Signature

SCHEMA_VERSION = 2
"""The newest that this reads. Raised when a reader of the old schema would misread the new one: 2 has coded variants."""
_PLAIN_VERSION = 1
"""Written where no variant is coded, so that old readers read it."""


class FileEntry(msgspec.Struct, frozen=True):
    """One file of the bundle; ``path`` is relative, with forward slashes."""

    path: str
    size_bytes: int
    sha256: str


class Variant(msgspec.Struct, frozen=True):
    """One way to run the model: a file, the engine that it was measured on, and that engine's options."""

    name: str
    file: str
    engine: str
    precision: str
    """``fp32``, ``bf16`` or ``int8``."""
    options: dict[str, Any] = {}
    requires: tuple[str, ...] = ()
    """Instruction sets without which its answers or its speed are not what was measured."""
    coding: Literal["", "coded"] = ""
    """``coded`` if the file is a coded model (``penstock.bundle.coded``), which is decoded when it is loaded."""
    decoded_bytes: int = 0
    decoded_sha256: str = ""
    """Size and digest of the model that a coded file decodes to."""


class ServingConfig(msgspec.Struct, frozen=True):
    """How the tuner found the model best served on the machine where it was built."""

    variant: str
    """Name of the chosen variant."""
    threads: int
    instances: int
    max_batch: int
    """Largest batch to form; 1 if the model cannot be batched."""
    latency: tuple[LatencyPoint, ...] = ()
    """Measured profile of the chosen variant, by rising batch size."""
    p99_ms: float | None = None
    """The latency objective that was asked for."""


class Manifest(msgspec.Struct, frozen=True):
    """See the module."""

    name: str
    signature: Signature
    variants: tuple[Variant, ...]
    """The chosen one first, then those to fall back to."""
    serving: ServingConfig
    machine: MachineFacts
    files: tuple[FileEntry, ...]
    provenance: tuple[Step, ...] = ()
    evidence: Evidence | None = None
    tools: dict[str, str] = {}
    """Versions of the tools that built it."""
    schema_version: int = _PLAIN_VERSION

    def variant(self, name: str) -> Variant:
        """The variant called ``name``. Raises InvalidArgument."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise InvalidArgument(
            f"bundle '{self.name}' has no variant '{name}'", f"it has: {[v.name for v in self.variants]}"
        )


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes of ``manifest``, of the least schema version that says to whom it can be given."""
    version = max(manifest.schema_version, SCHEMA_VERSION if _is_coded(manifest) else _PLAIN_VERSION)
    return msgspec.json.encode(msgspec.structs.replace(manifest, schema_version=version), order="sorted")


def decode(data: bytes) -> Manifest:
    """Read a manifest. Raises IntegrityError if it is not one, Unsupported if a newer Penstock wrote it."""
    try:
        version = msgspec.json.decode(data, type=_Versioned).schema_version
        if version > SCHEMA_VERSION:
            raise Unsupported(
                f"the bundle has schema version {version}, this Penstock reads up to {SCHEMA_VERSION}", "upgrade"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"the bundle's manifest cannot be read: {error}") from None
    if version <= _PLAIN_VERSION and _is_coded(manifest):
        raise IntegrityError(f"the bundle has a coded variant, which schema version {version} does not know")
    return manifest


def _is_coded(manifest: Manifest) -> bool:
    return any(variant.coding for variant in manifest.variants)


class _Versioned(msgspec.Struct):
    schema_version: int
