"""The storage seam: files by path below one root, wherever that root is.

``tests/conformance/storage.py`` states this contract as tests; every storage runs it. A storage is added by one file.
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
    """0 for a folder."""
    stamp: str = ""
    """Changes whenever a file's content is replaced; empty for a folder, and for a link that leads nowhere."""


class Storage(Protocol):
    """Files below a root. Paths are relative to it, with ``/`` between their parts, and never leave it.

    Folders exist only because of the files in them. All methods block and may be called from any thread. Besides the errors named
    below, every method raises InvalidArgument for a path that leaves the root.
    """

    def list(self, folder: str = "") -> Sequence[StorageEntry]:
        """What ``folder`` holds, by name; files that are still being written are left out. Raises NotFound."""
        ...

    def read(self, path: str, most_bytes: int | None = None) -> bytes:
        """The content of a file. Raises NotFound; InvalidArgument if it has more than ``most_bytes``."""
        ...

    def digest(self, path: str) -> str:
        """Hexadecimal SHA-256 of a file's content, read in pieces. Raises NotFound."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write or replace one file: readers see the old content or the new. Raises ResourceExhausted."""
        ...

    def publish(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Add a folder in two phases: write all ``files`` (path in the folder -> content) out of sight, then show them at once.

        What was published does not change. Raises AlreadyExists if the folder is there, ResourceExhausted.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that it holds. Does nothing if there is neither."""
        ...

    def localize(self, path: str) -> Path:
        """A local copy of a file or folder, or the original where that is local; not to be written to. Raises NotFound."""
        ...


def is_contained(path: str) -> bool:
    """Whether ``path`` is relative, in its simplest form, and does not leave the folder that it is relative to."""
    pure = PurePosixPath(path)
    is_plain = pure.as_posix() == path and path != "." and "\\" not in path and "\0" not in path
    return is_plain and not pure.is_absolute() and ".." not in pure.parts


def check_contained(path: str) -> str:
    """``path``. Raises InvalidArgument unless ``is_contained``."""
    if not is_contained(path):
        raise InvalidArgument(
            f"the path '{path}' is not relative to the storage's root", "write e.g. 'model/1/model.onnx'"
        )
    return path


def missing(path: str) -> NotFound:
    """What to raise if there is nothing at ``path``."""
    return NotFound(f"the storage has no '{path}'", "check the path")


def too_large(path: str, most_bytes: int) -> InvalidArgument:
    """What to raise if a file is larger than the reader can take."""
    return InvalidArgument(f"the file '{path}' has more than {most_bytes} bytes")
