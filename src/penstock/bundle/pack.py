"""Write a bundle, either as one file (an uncompressed zip) or as a folder with the same files.

The same manifest and files always give the same bytes. Writing is atomic: the bundle is written into the folder
``<target>.<random>.partial`` next to the target, and renamed when it is complete. If the process is killed, this folder remains and
can be removed. Penstock does not open it as a bundle.

The comment of the zip is the SHA-256 of all bytes before it. The comment also covers the zip's own structure, unlike the digests of
the files.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec

from penstock.artifact import Artifact, Format, file_entries, sha256
from penstock.bundle.coded import CodingOptions
from penstock.bundle.coded import encode as encode_model
from penstock.bundle.manifest import MANIFEST, MANIFEST_DIGEST, AnyManifest, Manifest, Variant, decode, encode
from penstock.errors import AlreadyExists, PenstockError
from penstock.storage.atomic import replacing, write_durable_folder

SEAL_SIZE = 64
"""Length of the zip comment: a SHA-256 in hexadecimal."""

_CHUNK_BYTES = 1 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)


def place(artifact: Artifact) -> dict[str, bytes]:
    """The files of ``artifact`` by their paths in a bundle, the main file first. The same model always has the same paths."""
    stem = f"models/{artifact.digest[:16]}"
    if not artifact.beside:
        return {stem + PurePosixPath(artifact.file_name).suffix: artifact.data}
    return {f"{stem}/{path}": data for path, data in artifact.files().items()}


def code_variants(
    manifest: Manifest, files: Mapping[str, bytes], options: CodingOptions | None = None
) -> tuple[Manifest, dict[str, bytes]]:
    """Encode each ONNX model of the bundle if that makes its file smaller. Raises the errors of ``coded.encode``."""
    plain = {one.file for one in manifest.variants if one.format is Format.ONNX and not (one.coding or one.beside)}
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
    manifest: AnyManifest, files: Mapping[str, bytes], target: Path, overwrite: bool = False, folder: bool = False
) -> None:
    """Write ``manifest`` and the ``files`` that it lists to ``target``.

    ``overwrite`` replaces a file or a bundle, but not a folder that contains any other file. Raises AlreadyExists if ``target`` exists
    and may not be replaced, ResourceExhausted if it cannot be written, IntegrityError if the manifest contradicts itself.
    """
    if manifest.files != file_entries(files):
        raise PenstockError("the manifest does not list the files that are to be packed")
    manifest.check()
    if target.exists() and not overwrite:
        raise AlreadyExists(f"'{target}' exists", "remove it, choose another name, or allow overwriting")
    check_folder(target)
    data = encode(manifest)
    entries = {MANIFEST: data, MANIFEST_DIGEST: sha256(data).encode(), **files}
    with replacing(target) as new:
        if folder:
            write_durable_folder(new, entries)
        else:
            write_zip(new, entries)


def check_folder(target: Path) -> None:
    """Raise AlreadyExists if ``target`` is a folder that contains anything except the files of one bundle."""
    if not target.is_dir() or not any(target.iterdir()):
        return
    try:
        manifest = decode((target / MANIFEST).read_bytes())
    except (OSError, PenstockError):
        raise AlreadyExists(f"'{target}' is a folder that is not a bundle", "choose another name") from None
    own = {MANIFEST, MANIFEST_DIGEST, *(entry.path for entry in manifest.files)}
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target).as_posix()
        if name not in own and (path.is_symlink() or not path.is_dir()):
            raise AlreadyExists(
                f"'{target}' contains '{name}', which is not part of the bundle and would be lost",
                "move it or choose another name",
            )


def write_zip(path: Path, entries: Mapping[str, bytes]) -> None:
    """Write a zip of ``entries`` with its digest as comment. The manifest comes first. Times and modes are fixed."""
    with path.open("w+b") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(entries, key=lambda name: (name not in (MANIFEST, MANIFEST_DIGEST), name)):
                info = zipfile.ZipInfo(name, _EPOCH)
                info.external_attr = 0o644 << 16
                archive.writestr(info, entries[name])
            archive.comment = b"0" * SEAL_SIZE
        seal = seal_of(file)
        file.seek(-SEAL_SIZE, os.SEEK_END)
        file.write(seal)
        file.flush()
        os.fsync(file.fileno())


def seal_of(file: BinaryIO) -> bytes:
    """The digest of ``file`` without its seal, which is the rest of the file after this call."""
    digest, left = hashlib.sha256(), file.seek(0, os.SEEK_END) - SEAL_SIZE
    file.seek(0)
    while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest().encode()
