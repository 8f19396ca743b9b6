"""Open a bundle, which is a file or a folder. Digests are verified before any content is used."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from penstock.artifact import TITLES, Artifact, Format, format_of, local_path, refuse_declaration, sha256
from penstock.bundle import coded
from penstock.bundle.manifest import (
    MANIFEST,
    MANIFEST_DIGEST,
    AnyManifest,
    Manifest,
    PipelineManifest,
    Variant,
    check_paths,
    decode,
)
from penstock.bundle.pack import seal_of
from penstock.errors import IntegrityError, NotFound, Unavailable, Unsupported
from penstock.resources import MachineFacts

# The errors that zipfile raises for forged archives.
_ZIP_ERRORS = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, struct.error)
_SUFFIX, _ZIP_MAGIC = ".bundle", b"PK\3\4"
_MAX_MANIFEST_BYTES = 64 << 20
"""Limit on the manifest's size. The manifest is read before its digest can be checked; manifests of builds are far smaller."""


class Contents(NamedTuple):
    """The verified files of a bundle of any kind."""

    path: Path
    manifest: AnyManifest
    digest: str
    """SHA-256 of the manifest."""
    files: dict[str, bytes]


class Bundle:
    """The opened bundle of a model: its manifest, and its files in memory, all verified."""

    def __init__(self, path: Path, manifest: Manifest, digest: str, files: Mapping[str, bytes]) -> None:
        self.path = path
        self.manifest = manifest
        self.digest = digest
        """SHA-256 of the manifest, which contains the digests of all files."""
        self._files = files

    @property
    def name(self) -> str:
        return self.manifest.name

    def read(self, path: str) -> bytes:
        """The content of one file. Raises NotFound."""
        try:
            return self._files[path]
        except KeyError:
            raise NotFound(
                f"bundle '{self.name}' has no file '{path}'", f"its files are {sorted(self._files)}"
            ) from None

    def artifact(self, variant: Variant) -> Artifact:
        """The model of ``variant`` with all its files, decoded if it is coded.

        Raises NotFound, and IntegrityError if a coded model does not decode to the model that was packed.
        """
        main = PurePosixPath(variant.file)
        files = {str(PurePosixPath(path).relative_to(main.parent)): self.read(path) for path in variant.paths}
        if variant.coding:
            data = coded.decode(files[main.name], min(variant.decoded_bytes, coded.MAX_BYTES))
            if (len(data), sha256(data)) != (variant.decoded_bytes, variant.decoded_sha256):
                raise IntegrityError(
                    f"variant '{variant.name}' of bundle '{self.name}' decodes to a different model than the one that was packed"
                )
            return Artifact.from_bytes(data, variant.format, self.manifest.provenance)
        return Artifact.from_files(main.name, files, variant.format, self.manifest.provenance)

    def choose(self, machine: MachineFacts, has_engine: Callable[[str], bool] = lambda _: True) -> Variant:
        """The first variant that runs on ``machine``, which must support its instruction sets; ``has_engine`` must accept its engine.

        Raises Unavailable if there is none.
        """
        reasons = []
        for variant in self.manifest.variants:
            if lacking := machine.lacks(variant.requires):
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
        """List the differences between ``machine`` and the machine of the build. Any difference may make the profile invalid."""
        built = self.manifest.machine
        facts = (
            ("CPU", built.cpu, machine.cpu),
            ("cores", built.cores, machine.cores),
            ("ISA", built.isa, machine.isa),
        )
        return [f"{what}: measured on {before}, here {now}" for what, before, now in facts if before != now]


def open_bundle(path: str | Path) -> Bundle:
    """Open the bundle of a model. Raises the errors of ``read_bundle``, and Unsupported if it is the bundle of a pipeline."""
    return as_model(read_bundle(path))


def as_model(contents: Contents) -> Bundle:
    """The bundle of a model with these ``contents``. Raises Unsupported if they are those of a pipeline."""
    path, manifest, digest, files = contents
    if isinstance(manifest, PipelineManifest):
        raise Unsupported(f"'{path.name}' contains a pipeline, not one model", "name the bundle of a model")
    return Bundle(path, manifest, digest, files)


def read_inner(path: Path, data: bytes) -> Contents:
    """Verify the bundle ``data``, which is in one file of another bundle. ``path`` names it in errors. Raises IntegrityError."""
    return _read_file(path, io.BytesIO(data))


def read_bundle(path: str | Path) -> Contents:
    """Read and verify the bundle at ``path``.

    Raises NotFound. Raises IntegrityError for any modification: e.g. a changed byte, an added or missing file, or a path outside the
    bundle. Raises Unsupported if the bundle has a newer schema.
    """
    path = local_path(path)
    if not path.exists():
        raise NotFound(f"no bundle '{path}'", "check the path, or make one with `penstock build`")
    try:
        if path.is_dir():
            return _verified(path, _sizes_in_folder(path), lambda name: (path / name).read_bytes())
        if not path.is_file():  # reading a device or a pipe might never end
            raise IntegrityError(f"'{path}' is neither a file nor a folder, so it is not a Penstock bundle")
        with path.open("rb") as file:
            return _read_file(path, file)
    except OSError as error:
        raise IntegrityError(f"cannot read bundle '{path}': {error.strerror or error}") from error


def open_model(path: str | Path) -> Bundle | Artifact:
    """Open the bundle, model file or model folder at ``path``. Raises the errors of ``open_bundle`` and ``Artifact.from_file``."""
    path = local_path(path)
    if not path.exists():
        raise NotFound(f"no bundle or model '{path}'", "check the path, or make a bundle with `penstock build`")
    if may_be_bundle(path):
        return open_bundle(path)
    return Artifact.from_file(path)


def may_be_bundle(path: Path) -> bool:
    """True if ``path`` is a bundle, or a damaged file that may be a part of one."""
    return is_bundle(path) or (format_of(path) is None and _may_be_damaged(path))


def is_bundle(path: Path) -> bool:
    """True if ``path`` has a manifest, unlike other archives such as npz files. Nothing is verified."""
    if path.is_dir():
        return (path / MANIFEST).is_file()
    if not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return MANIFEST in archive.namelist()
    except (OSError, *_ZIP_ERRORS):
        return False


def is_pipeline(path: Path) -> bool:
    """True if ``path`` is the bundle of a pipeline. Nothing is verified."""
    return is_bundle(path) and isinstance(peek(path), PipelineManifest)


def _may_be_damaged(path: Path) -> bool:
    """True if ``path``, which is no complete bundle, may be a part of one: by its suffix, or as the beginning of a zip file."""
    if path.suffix.lower() == _SUFFIX:
        return True
    if not path.is_file() or zipfile.is_zipfile(path):
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    except OSError:
        return True  # the error of reading it as a bundle names the cause


def peek(path: Path) -> AnyManifest:
    """The unverified manifest of the bundle at ``path``. Raises IntegrityError, Unsupported."""
    try:
        if path.is_dir():
            return decode((path / MANIFEST).read_bytes())
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo(MANIFEST).file_size > _MAX_MANIFEST_BYTES:
                raise _no_manifest(path)
            return decode(archive.read(MANIFEST))
    except (OSError, KeyError, *_ZIP_ERRORS):
        raise _no_manifest(path) from None


def _read_file(path: Path, file: BinaryIO) -> Contents:
    if seal_of(file) != file.read():
        raise _damage(path, file)
    try:
        with zipfile.ZipFile(file) as archive:
            return _verified(path, _sizes_in_archive(path, archive, file.seek(0, io.SEEK_END)), archive.read)
    except _ZIP_ERRORS as error:
        raise IntegrityError(f"'{path.name}' is not a readable bundle: {str(error) or type(error).__name__}") from None


def _damage(path: Path, file: BinaryIO) -> IntegrityError:
    """The error about a file whose seal is wrong. Raises Unsupported if the file is the declaration of a pipeline."""
    if not zipfile.is_zipfile(file):
        refuse_declaration(path)
        if (format := format_of(path)) is not None:
            return IntegrityError(
                f"'{path.name}' is a model file ({TITLES[format]}), not a Penstock bundle",
                "make a bundle of it with `penstock build`" if format is Format.ONNX else "name a bundle",
            )
        return IntegrityError(f"'{path.name}' is not a Penstock bundle, or the file is truncated")
    # An archive contains each name twice. If one byte is damaged, at least one of the two copies is intact.
    file.seek(0)
    return _changed(path, "the archive") if MANIFEST_DIGEST.encode() in file.read() else _no_manifest(path)


def _sizes_in_archive(path: Path, archive: zipfile.ZipFile, total: int) -> dict[str, int]:
    infos = archive.infolist()
    check_paths([info.filename for info in infos])
    for info in infos:
        if stat.S_ISLNK(info.external_attr >> 16):
            raise IntegrityError(f"entry '{info.filename}' of '{path.name}' is a link, which might leave the bundle")
        if info.compress_type != zipfile.ZIP_STORED:
            raise IntegrityError(
                f"entry '{info.filename}' of '{path.name}' is compressed, but bundles contain uncompressed entries"
            )
    # Stored entries that do not overlap are smaller than the file, so reading them takes no more memory than the file.
    if sum(info.file_size for info in infos) > total:
        raise IntegrityError(f"the entries of '{path.name}' overlap: together they are larger than the file")
    return {info.filename: info.file_size for info in infos}


def _sizes_in_folder(path: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_symlink():
            raise IntegrityError(f"'{name}' in bundle '{path.name}' is a link, which might leave the folder")
        if file.is_file():
            sizes[name] = file.stat().st_size
        elif not file.is_dir():
            raise IntegrityError(f"'{name}' in bundle '{path.name}' is neither a file nor a folder")
    return sizes


def _verified(path: Path, sizes: Mapping[str, int], read: Callable[[str], bytes]) -> Contents:
    """Read the bundle whose files have the ``sizes`` (name -> bytes). ``read`` is called only for files that the manifest lists."""
    if MANIFEST not in sizes or MANIFEST_DIGEST not in sizes:
        raise _no_manifest(path)
    if sizes[MANIFEST] > _MAX_MANIFEST_BYTES:
        raise IntegrityError(f"the manifest of '{path.name}' is larger than {_MAX_MANIFEST_BYTES >> 20} MiB")
    data = read(MANIFEST)
    digest = sha256(data)
    if sizes[MANIFEST_DIGEST] != len(digest) or read(MANIFEST_DIGEST) != digest.encode():
        raise _changed(path, MANIFEST)
    manifest = decode(data)
    _check_listing(path, manifest, sizes)
    files = {}
    for entry in manifest.files:
        files[entry.path] = read(entry.path)
        if sha256(files[entry.path]) != entry.sha256:
            raise _changed(path, entry.path)
    return Contents(path, manifest, digest, files)


def _check_listing(path: Path, manifest: AnyManifest, sizes: Mapping[str, int]) -> None:
    manifest.check()
    listed = {entry.path: entry for entry in manifest.files}
    there = set(sizes) - {MANIFEST, MANIFEST_DIGEST}
    if missing := sorted(set(listed) - there):
        raise IntegrityError(f"bundle '{path.name}' lacks {missing}", "copy it again")
    if unlisted := sorted(there - set(listed)):
        raise IntegrityError(f"bundle '{path.name}' contains files that its manifest does not list: {unlisted}")
    for name, entry in listed.items():
        if sizes[name] != entry.size_bytes:
            raise _changed(path, name)


def _no_manifest(path: Path) -> IntegrityError:
    return IntegrityError(f"'{path.name}' is not a Penstock bundle: it has no manifest")


def _changed(path: Path, what: str) -> IntegrityError:
    return IntegrityError(
        f"bundle '{path.name}' was changed since it was packed: {what} does not match its digest", "copy it again"
    )
