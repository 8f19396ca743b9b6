"""Write a bundle: one file (an uncompressed zip that any zip tool lists) or a folder of the same files.

The same manifest and files give the same bytes. A bundle appears whole or not at all: it is written beside its target
under a ``.partial`` name and renamed when it is complete.

The zip's comment is the SHA-256 of all bytes before it, which covers what per-file digests do not: the container itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from penstock.artifact import sha256
from penstock.bundle.manifest import FileEntry, Manifest, encode
from penstock.errors import AlreadyExists, IntegrityError, PenstockError, ResourceExhausted

MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"
SEAL_SIZE = 64
"""Length of the zip comment: a SHA-256 in hexadecimal."""

_EPOCH = (1980, 1, 1, 0, 0, 0)


def file_entries(files: Mapping[str, bytes]) -> tuple[FileEntry, ...]:
    """The manifest's list for ``files`` (relative path -> content), sorted by path."""
    return tuple(FileEntry(path, len(data), sha256(data)) for path, data in sorted(files.items()))


def pack(
    manifest: Manifest, files: Mapping[str, bytes], target: Path, overwrite: bool = False, folder: bool = False
) -> None:
    """Write ``manifest`` and the ``files`` that it lists to ``target``.

    ``overwrite`` replaces a file or a bundle; a folder that holds anything else is never touched.
    Raises AlreadyExists if ``target`` is there and may not be replaced, ResourceExhausted if the disk is full.
    """
    for path in files:
        check_path(path)
    if manifest.files != file_entries(files) or MANIFEST in files or MANIFEST_DIGEST in files:
        raise PenstockError("the manifest does not list the files that are to be packed")
    if target.exists() and not overwrite:
        raise AlreadyExists(f"'{target}' exists", "remove it, choose another name, or allow overwriting")
    if target.is_dir() and not (target / MANIFEST).is_file() and any(target.iterdir()):
        raise AlreadyExists(f"'{target}' is a folder that holds no bundle", "choose another name")
    data = encode(manifest)
    entries = {MANIFEST: data, MANIFEST_DIGEST: sha256(data).encode(), **files}
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        if folder:
            _write_folder(partial, entries)
        else:
            _write_file(partial, zip_bytes(entries))
        _replace(partial, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            _remove(partial)
        raise ResourceExhausted(
            f"cannot write '{target}': {error.strerror or error}", "free some space or choose another place"
        ) from error


def zip_bytes(entries: Mapping[str, bytes]) -> bytes:
    """A sealed zip of ``entries``: stored, in sorted order after the manifest, with fixed times and modes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(entries, key=lambda path: (path not in (MANIFEST, MANIFEST_DIGEST), path)):
            info = zipfile.ZipInfo(path, _EPOCH)
            info.external_attr = 0o644 << 16
            archive.writestr(info, entries[path])
        archive.comment = b"0" * SEAL_SIZE
    unsealed = buffer.getvalue()[:-SEAL_SIZE]
    return unsealed + sha256(unsealed).encode()


def check_path(path: str) -> None:
    """Raise IntegrityError unless ``path`` is relative and stays below the bundle's folder."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or pure.as_posix() != path or path == ".":
        raise IntegrityError(f"path '{path}' leaves the bundle")


def _write_folder(folder: Path, entries: Mapping[str, bytes]) -> None:
    for path, data in entries.items():
        _write_file(folder / path, data)


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(partial: Path, target: Path) -> None:
    if target.exists() and (target.is_dir() or partial.is_dir()):
        # A folder cannot be renamed over anything with content; the old one moves aside first, so a complete one is always there.
        aside = target.with_name(target.name + ".old.partial")
        _remove(aside)
        target.rename(aside)
        partial.rename(target)
        _remove(aside)
    else:
        partial.replace(target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
