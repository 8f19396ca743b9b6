"""Interface of storages. A storage holds files below a root, which may be local or remote.

The tests in ``tests/conformance/storage.py`` check this contract for every storage. A new storage needs only one new file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec

from penstock.errors import InvalidArgument, NotFound


class StorageEntry(msgspec.Struct, frozen=True):
    """A file or folder in a listing."""

    name: str
    is_folder: bool = False
    size_bytes: int = 0
    """Size of a file; 0 for a folder."""
    stamp: str = ""
    """Changes whenever a file's content is replaced; empty for a folder and for a broken link."""


class Storage(Protocol):
    """Files below a root. Paths are relative to the root, use ``/``, and never leave it.

    A folder exists while there are files in it. All methods block, and any thread may call them. In addition to the errors named
    below, every method raises InvalidArgument for a path that leaves the root.
    """

    def list(self, folder: str = "") -> Sequence[StorageEntry]:
        """The entries of ``folder``, by name, without files that are still being written. Raises NotFound."""
        ...

    def read(self, path: str, most_bytes: int | None = None) -> bytes:
        """The content of a file. Raises NotFound, and InvalidArgument if the file has more than ``most_bytes``."""
        ...

    def digest(self, path: str) -> str:
        """Hexadecimal SHA-256 of a file's content, read in chunks. Raises NotFound."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write or replace one file atomically: readers see either the old or the new content. Raises ResourceExhausted."""
        ...

    def publish(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Add a folder atomically. All ``files`` (path in the folder -> content) are first written under a hidden name, and then
        become visible together.

        Published files do not change. Raises AlreadyExists if the folder exists, ResourceExhausted.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content. Does nothing if ``path`` does not exist."""
        ...

    def localize(self, path: str) -> Path:
        """A local copy of a file or folder, or the original if it is local. The caller must not modify it. Raises NotFound."""
        ...


def is_contained(path: str) -> bool:
    """True if ``path`` is relative, in its simplest form, and stays inside its base folder."""
    pure = PurePosixPath(path)
    is_plain = pure.as_posix() == path and path != "." and "\\" not in path and "\0" not in path
    return is_plain and not pure.is_absolute() and ".." not in pure.parts


def check_contained(path: str) -> str:
    """Return ``path`` unchanged. Raises InvalidArgument unless ``is_contained(path)``."""
    if not is_contained(path):
        raise InvalidArgument(
            f"the path '{path}' is not relative to the storage's root", "write e.g. 'model/1/model.onnx'"
        )
    return path


def missing(path: str) -> NotFound:
    """The error for a ``path`` that does not exist."""
    return NotFound(f"the storage has no '{path}'", "check the path")


def too_large(path: str, most_bytes: int) -> InvalidArgument:
    """The error for a file that is larger than the reader's limit."""
    return InvalidArgument(f"the file '{path}' has more than {most_bytes} bytes")
