"""Write a bundle: one file (an uncompressed zip that any zip tool lists) or a folder of the same files.

The same manifest and files give the same bytes. A bundle appears whole or not at all: it is written into a folder of its
own beside the target, ``<target>.<random>.partial``, and renamed when it is complete. What a killed build leaves there is
never taken for a bundle, and may be removed.

The zip's comment is the SHA-256 of all bytes before it, which covers what per-file digests do not: the container itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec

from penstock.artifact import sha256
from penstock.bundle.coded import CodingOptions
from penstock.bundle.coded import encode as encode_model
from penstock.bundle.manifest import FileEntry, Manifest, Variant, decode, encode
from penstock.errors import AlreadyExists, IntegrityError, PenstockError, ResourceExhausted

MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"
SEAL_SIZE = 64
"""Length of the zip comment: a SHA-256 in hexadecimal."""

# From linux/fcntl.h and linux/fs.h.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_EPOCH = (1980, 1, 1, 0, 0, 0)


def file_entries(files: Mapping[str, bytes]) -> tuple[FileEntry, ...]:
    """The manifest's list for ``files`` (relative path -> content), sorted by path."""
    return tuple(FileEntry(path, len(data), sha256(data)) for path, data in sorted(files.items()))


def code_variants(
    manifest: Manifest, files: Mapping[str, bytes], options: CodingOptions | None = None
) -> tuple[Manifest, dict[str, bytes]]:
    """The same bundle with each variant's model coded where that makes its file smaller. Raises as ``coded.encode``."""
    plain = {variant.file for variant in manifest.variants if not variant.coding}
    coded = {path: encode_model(files[path], options) for path in sorted(plain)}
    coded = {path: data for path, data in coded.items() if len(data) < len(files[path])}
    variants = tuple(
        _coded_variant(variant, files[variant.file]) if variant.file in coded else variant
        for variant in manifest.variants
    )
    kept = {path: data for path, data in files.items() if path not in coded}
    kept |= {_coded_path(path): data for path, data in coded.items()}
    return msgspec.structs.replace(manifest, variants=variants, files=file_entries(kept)), kept


def _coded_variant(variant: Variant, model: bytes) -> Variant:
    return msgspec.structs.replace(
        variant,
        file=_coded_path(variant.file),
        coding="coded",
        decoded_bytes=len(model),
        decoded_sha256=sha256(model),
    )


def _coded_path(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(".coded"))


def pack(
    manifest: Manifest, files: Mapping[str, bytes], target: Path, overwrite: bool = False, folder: bool = False
) -> None:
    """Write ``manifest`` and the ``files`` that it lists to ``target``.

    ``overwrite`` replaces a file or a bundle; a folder that holds anything else, even beside a bundle, is never touched.
    Raises AlreadyExists if ``target`` is there and may not be replaced, ResourceExhausted if it cannot be written.
    """
    for path in files:
        check_path(path)
    if manifest.files != file_entries(files) or MANIFEST in files or MANIFEST_DIGEST in files:
        raise PenstockError("the manifest does not list the files that are to be packed")
    if target.exists() and not overwrite:
        raise AlreadyExists(f"'{target}' exists", "remove it, choose another name, or allow overwriting")
    check_folder(target)
    data = encode(manifest)
    entries = {MANIFEST: data, MANIFEST_DIGEST: sha256(data).encode(), **files}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f"{target.name}.", suffix=".partial", dir=target.parent, ignore_cleanup_errors=True
        ) as partial:
            new = Path(partial) / "new"
            if folder:
                _write_folder(new, entries)
            else:
                _write_file(new, zip_bytes(entries))
            _replace(new, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise ResourceExhausted(f"cannot write '{target}': {error.strerror or error}", _remedy(error)) from error


def check_folder(target: Path) -> None:
    """Raise AlreadyExists if ``target`` is a folder that holds anything but one bundle's own files."""
    if not target.is_dir() or not any(target.iterdir()):
        return
    try:
        manifest = decode((target / MANIFEST).read_bytes())
    except (OSError, PenstockError):
        raise AlreadyExists(f"'{target}' is a folder that holds no bundle", "choose another name") from None
    own = {MANIFEST, MANIFEST_DIGEST, *(entry.path for entry in manifest.files)}
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target).as_posix()
        if name not in own and (path.is_symlink() or not path.is_dir()):
            raise AlreadyExists(
                f"'{target}' holds '{name}', which is not the bundle's and would be lost",
                "move it or choose another name",
            )


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
    for written in {(folder / path).parent for path in entries} | {folder}:
        _sync_folder(written)


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` last through a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``; what was there, if a folder is involved, stays beside ``new``."""
    if not (target.exists() and (target.is_dir() or new.is_dir())):
        new.replace(target)
    elif not _exchange(new, target):
        # A folder cannot be renamed over anything with content. A kill between these two leaves no target, but both
        # bundles whole in the ``.partial`` folder, as "old" and "new".
        target.rename(new.with_name("old"))
        new.rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names at once; False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # not Linux
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return "free some space or choose another place"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a place that you may write to"
    return "choose another place"
