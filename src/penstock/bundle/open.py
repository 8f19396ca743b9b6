"""Open a bundle, file or folder, and trust nothing in it before its digest matched."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from penstock.artifact import Artifact, Format, sha256
from penstock.bundle.manifest import Manifest, Variant, decode
from penstock.bundle.pack import MANIFEST, MANIFEST_DIGEST, SEAL_SIZE
from penstock.errors import IntegrityError, NotFound, PenstockError
from penstock.resources import MachineFacts


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

    def choose(self, machine: MachineFacts) -> Variant:
        """The first variant whose required instruction sets ``machine`` has. Raises PenstockError if there is none."""
        for variant in self.manifest.variants:
            if set(variant.requires) <= set(machine.isa):
                return variant
        wanted = [list(variant.requires) for variant in self.manifest.variants]
        raise PenstockError(
            f"no variant of bundle '{self.name}' fits this CPU: they require {wanted}",
            "build the bundle on this kind of machine",
        )


def open_bundle(path: str | Path) -> Bundle:
    """Read and verify the bundle at ``path``.

    Raises NotFound, and IntegrityError for anything that is not exactly what was packed: a changed byte, a file too
    many or too few, a path that leaves the bundle.
    """
    path = Path(path)
    if not path.exists():
        raise NotFound(f"no bundle '{path}'", "check the path, or make one with `penstock build`")
    entries = _read_folder(path) if path.is_dir() else _read_file(path)
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
    """Whether ``path`` looks like a bundle, without verifying it."""
    return (path / MANIFEST).is_file() if path.is_dir() else zipfile.is_zipfile(path)


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
                _check_path(info.filename)
                # Stored entries cannot be larger than the file, so no archive expands beyond what was read.
                if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                    raise IntegrityError(
                        f"entry '{info.filename}' of '{path.name}' is compressed, which no bundle's is"
                    )
            if len({info.filename for info in infos}) != len(infos):
                raise IntegrityError(f"'{path.name}' holds an entry twice")
            return {info.filename: archive.read(info) for info in infos}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise IntegrityError(f"'{path.name}' is not a readable bundle: {error}") from None


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
        _check_path(name)
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


def _check_path(name: str) -> None:
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or pure.as_posix() != name:
        raise IntegrityError(f"path '{name}' leaves the bundle")


def _changed(path: Path, what: str) -> IntegrityError:
    return IntegrityError(
        f"bundle '{path.name}' was changed since it was packed: {what} does not match its digest", "copy it again"
    )
