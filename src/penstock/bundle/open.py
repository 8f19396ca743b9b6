"""Open a bundle, file or folder, and trust nothing in it before its digest matched."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.artifact import Artifact, Format, sha256
from penstock.bundle.manifest import Manifest, Variant, decode
from penstock.bundle.pack import MANIFEST, MANIFEST_DIGEST, SEAL_SIZE, check_path
from penstock.errors import IntegrityError, NotFound, Unavailable
from penstock.resources import MachineFacts

# What zipfile raises on archives that someone made up.
_ZIP_ERRORS = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, struct.error)


class Bundle:
    """An opened bundle: its manifest, and its files in memory, all verified."""

    def __init__(self, path: Path, manifest: Manifest, digest: str, files: Mapping[str, bytes]) -> None:
        self.path = path
        self.manifest = manifest
        self.digest = digest
        """SHA-256 of the manifest, and through it of everything."""
        self._files = files

    @property
    def name(self) -> str:
        return self.manifest.name

    def read(self, path: str) -> bytes:
        """The content of one file. Raises NotFound."""
        try:
            return self._files[path]
        except KeyError:
            raise NotFound(f"bundle '{self.name}' has no file '{path}'", f"it has: {sorted(self._files)}") from None

    def artifact(self, variant: Variant) -> Artifact:
        """The model file of ``variant``."""
        return Artifact.from_bytes(self.read(variant.file), Format.ONNX, self.manifest.provenance)

    def choose(self, machine: MachineFacts, has_engine: Callable[[str], bool] = lambda _: True) -> Variant:
        """The first variant whose instruction sets ``machine`` has and whose engine ``has_engine`` knows to be installed.

        Raises Unavailable if none fits.
        """
        reasons = []
        for variant in self.manifest.variants:
            lacking = sorted(set(variant.requires) - set(machine.isa))
            if lacking:
                reasons.append(f"'{variant.name}' needs a CPU with {', '.join(lacking)}")
            elif not has_engine(variant.engine):
                reasons.append(f"'{variant.name}' needs engine '{variant.engine}', which is not installed")
            else:
                return variant
        raise Unavailable(
            f"no variant of bundle '{self.name}' runs here: {'; '.join(reasons)}",
            "build the bundle on this kind of machine",
        )

    def differences(self, machine: MachineFacts) -> list[str]:
        """In what ``machine`` differs from the one measured on, so that the profile may not hold; empty if it should."""
        built = self.manifest.machine
        facts = (
            ("CPU", built.cpu, machine.cpu),
            ("cores", built.cores, machine.cores),
            ("ISA", built.isa, machine.isa),
        )
        return [f"{what}: measured on {before}, here {now}" for what, before, now in facts if before != now]


def open_bundle(path: str | Path) -> Bundle:
    """Read and verify the bundle at ``path``.

    Raises NotFound, and IntegrityError for anything that is not exactly what was packed: a changed byte, a file too
    many or too few, a path that leaves the bundle.
    """
    path = Path(path)
    if not path.exists():
        raise NotFound(f"no bundle '{path}'", "check the path, or make one with `penstock build`")
    try:
        entries = _read_folder(path) if path.is_dir() else _read_file(path)
    except OSError as error:
        raise IntegrityError(f"cannot read bundle '{path}': {error.strerror or error}") from error
    if MANIFEST not in entries or MANIFEST_DIGEST not in entries:
        raise IntegrityError(f"'{path.name}' has no manifest: it is not a Penstock bundle")
    data = entries.pop(MANIFEST)
    digest = sha256(data)
    if entries.pop(MANIFEST_DIGEST) != digest.encode():
        raise _changed(path, MANIFEST)
    manifest = decode(data)
    _verify(path, manifest, entries)
    return Bundle(path, manifest, digest, entries)


def is_bundle(path: Path) -> bool:
    """Whether ``path`` looks like a bundle, without verifying it: other archives, npz files for one, do not."""
    if path.is_dir():
        return (path / MANIFEST).is_file()
    try:
        with zipfile.ZipFile(path) as archive:
            return MANIFEST in archive.namelist()
    except (OSError, *_ZIP_ERRORS):
        return False


def _read_file(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    if sha256(data[:-SEAL_SIZE]).encode() != data[-SEAL_SIZE:]:
        if not zipfile.is_zipfile(io.BytesIO(data)):
            raise IntegrityError(f"'{path.name}' is not a Penstock bundle, or it was cut off")
        raise _changed(path, "the archive")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            for info in infos:
                check_path(info.filename)
                # Stored entries cannot be larger than the file, so no archive expands beyond what was read.
                if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                    raise IntegrityError(
                        f"entry '{info.filename}' of '{path.name}' is compressed, which no bundle's is"
                    )
            if len({info.filename for info in infos}) != len(infos):
                raise IntegrityError(f"'{path.name}' holds an entry twice")
            return {info.filename: archive.read(info) for info in infos}
    except _ZIP_ERRORS as error:
        raise IntegrityError(f"'{path.name}' is not a readable bundle: {str(error) or type(error).__name__}") from None


def _read_folder(path: Path) -> dict[str, bytes]:
    entries: dict[str, bytes] = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_symlink():
            raise IntegrityError(f"'{name}' in bundle '{path.name}' is a link, which might leave the folder")
        if file.is_file():
            entries[name] = file.read_bytes()
    return entries


def _verify(path: Path, manifest: Manifest, entries: Mapping[str, bytes]) -> None:
    listed = {entry.path: entry for entry in manifest.files}
    for name in listed:
        check_path(name)
    if missing := sorted(set(listed) - set(entries)):
        raise IntegrityError(f"bundle '{path.name}' lacks {missing}", "copy it again")
    if unlisted := sorted(set(entries) - set(listed)):
        raise IntegrityError(f"bundle '{path.name}' holds files that its manifest does not list: {unlisted}")
    for name, entry in listed.items():
        if len(entries[name]) != entry.size_bytes or sha256(entries[name]) != entry.sha256:
            raise _changed(path, name)
    for variant in manifest.variants:
        if variant.file not in listed:
            raise IntegrityError(f"variant '{variant.name}' of bundle '{path.name}' names a file that is not in it")
    if all(manifest.serving.variant != variant.name for variant in manifest.variants):
        raise IntegrityError(f"bundle '{path.name}' serves a variant that is not in it")


def _changed(path: Path, what: str) -> IntegrityError:
    return IntegrityError(
        f"bundle '{path.name}' was changed since it was packed: {what} does not match its digest", "copy it again"
    )
