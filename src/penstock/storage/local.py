"""Storage in a local folder."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.artifact import sha256_of_file
from penstock.errors import AlreadyExists, InvalidArgument, NotFound, PenstockError
from penstock.storage.atomic import PARTIAL, replacing, write_durable_folder, write_whole
from penstock.storage.base import StorageEntry, check_contained, missing, too_large


class LocalStorage:
    """A ``Storage`` below the folder ``root``. If the folder does not exist, the first write creates it.

    Symbolic links that stay below the root are followed. With ``follows_links``, links that leave the root are followed too. Use
    this only if the root's owner is trusted.
    """

    def __init__(self, root: Path, *, follows_links: bool = False) -> None:
        self.root = root
        self._follows_links = follows_links

    def list(self, folder: str = "") -> Sequence[StorageEntry]:
        try:
            with os.scandir(self._at(folder) if folder else self.root) as entries:
                return sorted(
                    (_entry(one) for one in entries if not one.name.endswith(PARTIAL)), key=lambda entry: entry.name
                )
        except OSError as error:
            raise _unreadable(folder, error) from None

    def read(self, path: str, most_bytes: int | None = None) -> bytes:
        try:
            with self._at(path).open("rb") as file:
                data = file.read(-1 if most_bytes is None else most_bytes + 1)
        except OSError as error:
            raise _unreadable(path, error) from None
        if most_bytes is not None and len(data) > most_bytes:
            raise too_large(path, most_bytes)
        return data

    def digest(self, path: str) -> str:
        try:
            return sha256_of_file(self._at(path))[0]
        except OSError as error:
            raise _unreadable(path, error) from None

    def write(self, path: str, data: bytes) -> None:
        write_whole(self._new(path), data, durable=True)

    def publish(self, folder: str, files: Mapping[str, bytes]) -> None:
        for path in files:
            check_contained(path)
        target = self._new(folder)
        if target.exists():
            raise AlreadyExists(f"'{folder}' is already published", "publish under another name")
        with replacing(target, overwrite=False) as new:
            write_durable_folder(new, files)

    def remove(self, path: str) -> None:
        target = self._new(path)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            with suppress(FileNotFoundError):
                target.unlink()
        with suppress(OSError):  # ends at the first folder that is not empty
            for folder in list(target.relative_to(self.root).parents)[:-1]:
                (self.root / folder).rmdir()

    def localize(self, path: str) -> Path:
        found = self._at(path)
        if not found.exists():
            raise missing(path)
        return found

    def _at(self, path: str) -> Path:
        """The file system's path for reading ``path``."""
        return self._inside(self.root / check_contained(path), path)

    def _new(self, path: str) -> Path:
        """The file system's path for writing ``path``. A link at this path is replaced, so only its folder must be below the root."""
        target = self.root / check_contained(path)
        self._inside(target.parent, path)
        return target

    def _inside(self, target: Path, path: str) -> Path:
        if not self._follows_links and not target.resolve().is_relative_to(self.root.resolve()):
            raise InvalidArgument(f"the path '{path}' leads out of the storage through a link", "remove the link")
        return target


def _entry(found: os.DirEntry[str]) -> StorageEntry:
    try:
        if found.is_dir():
            return StorageEntry(found.name, is_folder=True)
        stat = found.stat()
    except OSError:  # a broken or circular link, or removed in the meantime
        return StorageEntry(found.name)
    return StorageEntry(found.name, False, stat.st_size, f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}")


def _unreadable(path: str, error: OSError) -> PenstockError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return missing(path)
    return NotFound(f"cannot read '{path}': {error.strerror}", "check the path and its permissions")
