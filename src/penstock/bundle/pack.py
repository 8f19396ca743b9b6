"""Write a bundle: one file (an uncompressed zip that any zip tool lists) or a folder of the same files.

The same manifest and files give the same bytes. A bundle appears whole or not at all: it is written into a folder
``<target>.<random>.partial`` beside the target, and renamed when it is complete. What a killed build leaves there is never taken for
a bundle, and may be removed.

The zip's comment is the SHA-256 of all bytes before it, which covers what per-file digests do not: the container itself.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec

from penstock.artifact import sha256
from penstock.bundle.coded import CodingOptions
from penstock.bundle.coded import encode as encode_model
from penstock.bundle.manifest import FileEntry, Manifest, Variant, decode, encode
from penstock.errors import AlreadyExists, IntegrityError, PenstockError
from penstock.storage.atomic import replacing, write_durable, write_durable_folder
from penstock.storage.base import is_contained

MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"
SEAL_SIZE = 64
"""Length of the zip comment: a SHA-256 in hexadecimal."""

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
    with replacing(target) as new:
        if folder:
            write_durable_folder(new, entries)
        else:
            write_durable(new, zip_bytes(entries))


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
    if not is_contained(path):
        raise IntegrityError(f"path '{path}' leaves the bundle")
