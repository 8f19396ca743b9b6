"""Write files and folders atomically.

New content is written to ``<target>.<random>.partial``, beside its target, and renamed when it is complete. A process that is killed
may leave such a file or folder behind. Penstock never reads it, and it can be removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from penstock.artifact import local_path
from penstock.errors import AlreadyExists, InvalidArgument, ResourceExhausted

PARTIAL = ".partial"
"""Suffix of files and folders that are still being written."""
_NAME_LENGTH = 60
"""Maximum length of the target's name as a part of the partial file's name, which can have at most 255 bytes."""
# From linux/fcntl.h and linux/fs.h.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_HINTS = {
    errno.ENOSPC: "free some space or choose another place",
    errno.EFBIG: "free some space or choose another place",
    errno.EDQUOT: "free some space or choose another place",
    errno.EACCES: "choose a place that you may write to",
    errno.EPERM: "choose a place that you may write to",
    errno.EROFS: "choose a place that you may write to",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def real_path(path: Path) -> Path:
    """The absolute ``path`` without links. A circular link is not resolved, so that using the path raises an OSError."""
    return Path(os.path.realpath(path))


def write_whole(path: Path, *parts: bytes, what: str = "", durable: bool = False, private: bool = False) -> None:
    """Write ``parts``, one after the other, to ``path``, with the guarantees of ``whole_file``."""
    with whole_file(path, what, durable=durable, private=private) as file:
        for part in parts:
            file.write(part)


def check_writable(path: Path, *, or_folder: bool = False) -> None:
    """Raise InvalidArgument if ``path`` is not writable. Call this before long work, so that the error occurs early.

    With ``or_folder``, ``path`` may also be an existing folder.
    """
    try:
        target = real_path(local_path(path))
        if not (or_folder and target.is_dir()):
            _mode_of(target)
        with tempfile.TemporaryFile(dir=next(parent for parent in target.parents if parent.exists())):
            pass
    except OSError as error:
        reason, hint = _explained(error)
        raise InvalidArgument(f"'{path}' cannot be written: {reason}", hint) from None


@contextlib.contextmanager
def whole_file(path: Path, what: str = "", *, durable: bool = False, private: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file. It is renamed to ``path`` when the block ends, and removed if the block raises.

    Missing parent folders are created. A replacement keeps the permissions of the replaced file. A new file has the default
    permissions; with ``private``, only the owner can access it. With ``durable``, the content survives a power cut. Converts
    OSErrors, including those of the block, to ResourceExhausted. The message names the path and the content (``what``).
    """
    partial = path.with_name(f"{path.name[:_NAME_LENGTH]}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        mode = _mode_of(local_path(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        default = 0o600 if private else 0o666
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode or default)
        with open(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)
            yield file
            if durable:
                _sync(file)
        partial.replace(path)
        if durable:
            _sync_folder(path.parent)
    except OSError as error:
        raise _cannot_write(path, what, error) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(target: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """A temporary path for a new file or folder. It is renamed to ``target`` when the block ends, and removed if the block raises.

    With ``overwrite``, an existing file or folder is replaced. Otherwise, AlreadyExists is raised if ``target`` exists when the
    block ends. A device or a pipe is never replaced. The caller must sync the content to disk. Raises ResourceExhausted like
    ``whole_file``.
    """
    try:
        if not local_path(target).is_dir():
            _mode_of(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f"{target.name[:_NAME_LENGTH]}.", suffix=PARTIAL, dir=target.parent, ignore_cleanup_errors=True
        ) as partial:
            new = Path(partial) / "new"
            yield new
            if overwrite:
                _replace(new, target)
            else:
                _claim(new, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise _cannot_write(target, "", error) from error


def write_durable(path: Path, data: bytes) -> None:
    """Write a file that survives a power cut, for use inside ``replacing``. Missing parent folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        _sync(file)


def write_durable_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` (relative path -> content) into ``folder``, for use inside ``replacing``."""
    for path, data in files.items():
        write_durable(folder / path, data)
    for written in {(folder / path).parent for path in files} | {folder}:
        _sync_folder(written)


def _mode_of(path: Path) -> int | None:
    """Permissions of the file at ``path``; None if it does not exist. Raises OSError if ``path`` is not a regular file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(mode):  # otherwise a file could replace a device
        raise OSError(errno.EINVAL, "it is not a regular file")
    return stat.S_IMODE(mode)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut, if the file system supports this."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``. If either is a folder, the two are swapped, so the old content is then at ``new``."""
    if not (target.exists() and (target.is_dir() or new.is_dir())):
        new.replace(target)
    elif not _exchange(new, target):
        # A folder cannot be renamed over anything with content. If the process is killed between these two steps, there is no
        # target, but the partial folder has both versions, "old" and "new".
        target.rename(new.with_name("old"))
        new.rename(target)


def _claim(new: Path, target: Path) -> None:
    """Rename the folder ``new`` to ``target``, which must not exist unless it is an empty folder."""
    try:
        new.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise AlreadyExists(f"'{target.name}' exists", "choose another name") from None
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False if the system or the file system does not support this."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # not Linux
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _cannot_write(path: Path, what: str, error: OSError) -> ResourceExhausted:
    reason, hint = _explained(error)
    return ResourceExhausted(f"cannot write {what}{' ' * bool(what)}'{path}': {reason}", hint)


def _explained(error: OSError) -> tuple[str, str]:
    """The reason why a path cannot be written, and a hint."""
    return error.strerror or str(error), _HINTS.get(error.errno or 0, "choose another place or name")
