"""The manifest of a bundle: the model's variants, serving configuration, evidence and provenance, or the parts of a pipeline.

The manifest is written as canonical JSON (sorted keys, no white space, UTF-8), so that equal manifests have equal bytes. The manifest
contains the digest of every file. Therefore ``Bundle.digest``, the digest of the manifest, identifies the whole bundle.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import msgspec

from penstock.artifact import FileEntry, Format, ProvenanceStep
from penstock.bundle.evidence import Evidence
from penstock.errors import IntegrityError, InvalidArgument, InvalidConfig, Unsupported, quoted
from penstock.measurement import LatencyPoint
from penstock.resources import MachineFacts
from penstock.storage.base import is_contained
from penstock.tensor import Signature

MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"

SCHEMA_VERSION = 5
"""The newest schema version that this Penstock reads. The version increases when older versions of Penstock would misread a new
manifest. Version 2 added coded variants; version 3 added formats other than ONNX, and models of several files; version 4 added
metrics; version 5 added pipelines.
"""
_PLAIN, _CODED, _FORMATS, _METRICS, _PIPELINES = 1, 2, 3, 4, 5
_OLD_METRICS = {"top-1", "agreement", "fidelity"}
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
BAD_NAME = re.compile(r"[/\\\x00-\x1f\x7f\ud800-\udfff]")
MAX_NAME = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Variant(msgspec.Struct, frozen=True):
    """One way to run the model: its files, the engine on which it was measured, and the engine's options."""

    name: str
    file: str
    """Path of the model's main file in the bundle."""
    engine: str
    precision: str
    """``fp32``, ``bf16`` or ``int8``."""
    options: dict[str, Any] = {}
    requires: tuple[str, ...] = ()
    """Instruction sets that the variant requires. Without these, outputs or speed would differ from the measurements."""
    coding: Literal["", "coded"] = ""
    """``coded`` if the file is a coded model (``penstock.bundle.coded``), which is decoded on loading."""
    decoded_bytes: int = 0
    decoded_sha256: str = ""
    """Size and digest of the decoded model; set only if the file is coded."""
    format: Format = Format.ONNX
    """The format of the model; for a coded model, the format after decoding."""
    beside: tuple[str, ...] = ()
    """Paths of the model's other files in the bundle, below the folder of ``file``."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all files of the variant, the main file first."""
        return (self.file, *self.beside)


class SourceModel(msgspec.Struct, frozen=True):
    """The model from which the bundle was made."""

    digest: str
    format: Format
    file: str
    """File name of the model; empty if the model was passed in memory."""


_Count = Annotated[int, msgspec.Meta(ge=1)]


class ServingConfig(msgspec.Struct, frozen=True):
    """The best serving settings, measured on the machine of the build."""

    variant: str
    """Name of the chosen variant."""
    threads: Annotated[int, msgspec.Meta(ge=0)]
    """Threads per instance; 0 leaves the number to the engine."""
    instances: _Count
    max_batch: _Count
    """Maximum batch size; 1 if requests are not batched."""
    latency: tuple[LatencyPoint, ...] = ()
    """Measured profile of the chosen variant, by ascending batch size."""
    p99_ms: float | None = None
    """The requested latency objective."""


class Manifest(msgspec.Struct, frozen=True):
    """The content of ``manifest.json``."""

    name: str
    signature: Signature
    variants: tuple[Variant, ...]
    """The chosen variant first, then the fallback variants."""
    serving: ServingConfig
    machine: MachineFacts
    files: tuple[FileEntry, ...]
    provenance: tuple[ProvenanceStep, ...] = ()
    evidence: Evidence | None = None
    tools: dict[str, str] = {}
    """Versions of the tools that built the bundle."""
    schema_version: int = _PLAIN
    version: str = "1"
    """The model's version: a positive whole number, as in a model repository."""
    source: SourceModel | None = None

    def variant(self, name: str) -> Variant:
        """The variant called ``name``. Raises InvalidArgument."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise InvalidArgument(
            f"bundle '{self.name}' has no variant '{name}'", f"its variants are {[v.name for v in self.variants]}"
        )

    def check(self) -> None:
        """Raise IntegrityError if the parts of the manifest contradict each other, or a path is outside the bundle."""
        _check_listing(self)
        listed, names = {entry.path for entry in self.files}, [variant.name for variant in self.variants]
        for variant in self.variants:
            self._check_variant(variant, listed)
        if len(set(names)) < len(names):
            raise IntegrityError(f"two variants of bundle '{self.name}' have the same name")
        if self.serving.variant not in names:
            raise IntegrityError(f"bundle '{self.name}' serves a variant that it does not contain")

    def _check_variant(self, variant: Variant, listed: set[str]) -> None:
        if not listed.issuperset(variant.paths):
            raise IntegrityError(f"variant '{variant.name}' of bundle '{self.name}' lists a missing file")
        folder = PurePosixPath(variant.file).parent
        if any(not PurePosixPath(path).is_relative_to(folder) or path == variant.file for path in variant.beside):
            raise IntegrityError(f"variant '{variant.name}' of bundle '{self.name}' has files outside its folder")
        if variant.format is Format.PYTHON:
            raise IntegrityError(f"variant '{variant.name}' of bundle '{self.name}' is Python code, not a model file")
        if variant.coding and (variant.format is not Format.ONNX or variant.beside):
            raise IntegrityError(f"variant '{variant.name}' of bundle '{self.name}' is coded, but not one ONNX file")


class PackedModel(msgspec.Struct, frozen=True):
    """A model of a pipeline: a whole bundle inside the bundle."""

    file: str
    """Path of the inner bundle."""
    digest: str
    """Digest of the inner bundle's manifest."""


class PipelineManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``manifest.json`` in the bundle of a pipeline."""

    name: str
    version: str = "1"
    description: str = ""
    pipeline: str = "pipeline.json"
    """Path of the declaration."""
    golden: str = ""
    """Path of the recorded examples; empty if there are none."""
    models: dict[str, PackedModel] = {}
    python: tuple[str, ...] = ()
    """Paths of the files with Python steps."""
    machine: MachineFacts
    """The machine on which the examples were recorded."""
    files: tuple[FileEntry, ...]
    tools: dict[str, str] = {}
    """Versions of the tools that packed the bundle."""
    schema_version: int = SCHEMA_VERSION

    def check(self) -> None:
        """Raise IntegrityError if the parts of the manifest contradict each other, or a path is outside the bundle."""
        _check_listing(self)
        named = [
            self.pipeline,
            *filter(None, (self.golden,)),
            *(one.file for one in self.models.values()),
            *self.python,
        ]
        listed = {entry.path for entry in self.files}
        if missing := [path for path in named if path not in listed]:
            raise IntegrityError(
                f"the manifest of bundle '{self.name}' names a file that it does not list: {missing[0]}"
            )


AnyManifest = Manifest | PipelineManifest


def _check_listing(manifest: AnyManifest) -> None:
    check_paths([MANIFEST, MANIFEST_DIGEST, *(entry.path for entry in manifest.files)])
    if not _VERSION.fullmatch(manifest.version):
        raise IntegrityError(
            f"the version of bundle '{manifest.name}' is '{manifest.version[:40]}', which is not a whole number"
        )


def check_name(name: str) -> None:
    """Raise InvalidArgument unless ``name`` is a name that a server accepts for a model."""
    if BAD_NAME.search(name) or not name.strip() or name.startswith(".") or len(name.encode()) > MAX_NAME:
        raise InvalidArgument(
            f"{quoted(name)} is not a valid model name",
            f"use 1 to {MAX_NAME} bytes without separators and control characters, and without a leading '.'",
        )


def check_version(version: str) -> None:
    """Raise InvalidConfig unless ``version`` is a valid version of a bundle."""
    if not _VERSION.fullmatch(version):
        raise InvalidConfig(f"'{version[:40]}' is not a model version", "give a whole number of at least 1, e.g. 2")


def check_paths(paths: Sequence[str]) -> None:
    """Raise IntegrityError unless every path is below the bundle's folder and no two paths are equal, ignoring case."""
    for path in paths:
        if not is_contained(path) or _CONTROL.search(path):
            raise IntegrityError(f"path '{path}' is outside the bundle")
    folders = {str(folder) for path in paths for folder in PurePosixPath(path).parents} - {"."}
    names = {name: unicodedata.normalize("NFKC", name).casefold() for name in (*paths, *folders)}
    counts = Counter(names[name] for name in (*paths, *folders))
    for name, folded in names.items():
        if counts[folded] > 1:
            raise IntegrityError(f"the bundle contains '{name}' twice, or under names that differ only in case")


def encode(manifest: AnyManifest) -> bytes:
    """Encode ``manifest`` as canonical bytes, with the lowest schema version that can represent it."""
    if isinstance(manifest, PipelineManifest):
        return msgspec.json.encode(manifest, order="sorted")
    version = max(manifest.schema_version, _needed_version(manifest))
    return msgspec.json.encode(msgspec.structs.replace(manifest, schema_version=version), order="sorted")


class _Versioned(msgspec.Struct):
    schema_version: int
    pipeline: Any = ()


# Created at import: msgspec is not safe if several threads first use a type at the same time.
_decode_version = msgspec.json.Decoder(_Versioned).decode
_decode_manifest = msgspec.json.Decoder(Manifest).decode
_decode_pipeline = msgspec.json.Decoder(PipelineManifest).decode


def decode(data: bytes) -> AnyManifest:
    """Read a manifest. Raises IntegrityError if ``data`` is not a manifest, Unsupported if a newer Penstock wrote it."""
    try:
        header = _decode_version(data)
        version = header.schema_version
        if version > SCHEMA_VERSION:
            raise Unsupported(
                f"the bundle has schema version {version}, but this Penstock reads versions up to {SCHEMA_VERSION}",
                "upgrade",
            )
        if header.pipeline:
            if version < _PIPELINES:
                raise IntegrityError(
                    f"the bundle has schema version {version}, but a pipeline needs version {_PIPELINES}"
                )
            return _decode_pipeline(data)
        manifest = _decode_manifest(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"the bundle's manifest cannot be read: {error}") from None
    if version < (needed := _needed_version(manifest)):
        raise IntegrityError(f"the bundle has schema version {version}, but its content needs version {needed}")
    return manifest


def _needed_version(manifest: Manifest) -> int:
    if not _metrics(manifest.evidence) <= _OLD_METRICS:
        return _METRICS
    if any(one.beside or one.format is not Format.ONNX for one in manifest.variants):
        return _FORMATS
    return _CODED if any(variant.coding for variant in manifest.variants) else _PLAIN


def _metrics(evidence: Evidence | None) -> set[str]:
    if evidence is None:
        return set()
    found = [record.accuracy for record in (evidence.baseline, *evidence.candidates)]
    found += [attempt.accuracy for attempt in evidence.attempts]
    return {accuracy.metric for accuracy in found if accuracy is not None}
