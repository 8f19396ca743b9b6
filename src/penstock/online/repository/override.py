"""A configuration and optional files that a client sends to replace the repository's configuration and files.

While a process uses the files, it holds a shared lock on their folder. The last process to release the lock removes the folder.
When a server starts, it removes folders that a killed server left behind.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import InvalidArgument, PenstockError, ResourceExhausted, quoted

_FILE = "file:"
_MAX_FILES = 1000
_MAX_DEPTH = 8
_MAX_NAME = 255
_FOLDER = re.compile(r"penstock-model-[a-z0-9_]{8}")
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_held: dict[str, int] = {}
"""The open lock file of each folder that this process uses."""
_PART = re.compile(r"[^/\\\x00-\x1f\x7f]+")


class Override(msgspec.Struct, frozen=True):
    """An override as plain data, which can be sent to all processes of a server."""

    config: str
    """The complete configuration, as JSON."""
    folder: str = ""
    """A private folder that replaces the model's folder in the repository; empty if the repository's folder is used."""


def is_file(parameter: str) -> bool:
    """True if a parameter with the name ``parameter`` contains a file of the model."""
    return parameter.startswith(_FILE)


def read_parameters(name: str, parameters: Mapping[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    """Read an override from the parameters of a request to load model ``name``. Returns the configuration, and the files by path
    within the model's folder.

    Raises InvalidArgument, and PenstockError for a path that is too long.
    """
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if is_file(key):
            if not isinstance(value, bytes):
                raise InvalidArgument(f"parameter {quoted(key)} to load model {quoted(name)} must contain bytes")
            files[_checked(key.removeprefix(_FILE), name)] = value
        elif key != "config":
            raise InvalidArgument(
                f"unknown parameter {quoted(key)} to load model {quoted(name)}", "use 'config' or 'file:<path>'"
            )
    config = parameters.get("config")
    if config is not None and not isinstance(config, str):
        raise InvalidArgument(f"parameter 'config' to load model {quoted(name)} must be a string with JSON")
    if files and config is None:
        raise InvalidArgument(
            f"the files to load model {quoted(name)} require its configuration too",
            "add the parameter 'config', '{}' if it is empty",
        )
    if len(files) > _MAX_FILES:
        raise InvalidArgument(
            f"there are {len(files)} files to load model {quoted(name)}, but at most {_MAX_FILES} are allowed"
        )
    return config, files


def _checked(path: str, name: str) -> str:
    parts = path.split("/")
    if any(len(part.encode()) > _MAX_NAME for part in parts):  # Triton reports this as a failure of the repository
        raise PenstockError(
            f"failed to load {quoted(name)}, failed to poll from model repository: {quoted(_FILE + path)} is too long",
            f"use at most {_MAX_NAME} bytes for a file's name",
        )
    if len(parts) > _MAX_DEPTH or any(part.startswith(".") or not _PART.fullmatch(part) for part in parts):
        raise InvalidArgument(
            f"{quoted(_FILE + path)} is not a valid path in the folder of model {quoted(name)}",
            "write e.g. 'file:1/model.onnx'",
        )
    return path


def store(files: Mapping[str, bytes]) -> Path:
    """Write ``files`` to a new private folder, and ``hold`` the folder until ``discard``. Blocks.

    Raises InvalidArgument, ResourceExhausted.
    """
    folder = ""
    try:
        while not hold(folder := tempfile.mkdtemp(prefix="penstock-model-")):
            pass  # another starting server has removed the folder as abandoned
        for path, data in files.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    except BaseException as error:
        discard(folder)
        if folder and isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
            raise InvalidArgument("a file to load has the same path as the folder of another file") from None
        if isinstance(error, OSError):
            raise ResourceExhausted(f"the files to load cannot be stored: {error.strerror}") from None
        raise
    return Path(folder)


def hold(folder: str) -> bool:
    """Mark ``folder`` as in use by this process until ``discard``. Returns False if the folder does not exist."""
    if folder in _held:
        return True
    try:
        file = os.open(folder, _OPEN)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not _lock(file, fcntl.LOCK_SH) or not os.path.isdir(folder):
        os.close(file)
        return False
    _held[folder] = file
    return True


def discard(folder: str) -> None:
    """Release ``folder``, and remove it if no other process uses it. Blocks."""
    if not hold(folder):
        return
    file = _held.pop(folder)
    if _lock(file, fcntl.LOCK_EX):
        shutil.rmtree(folder, ignore_errors=True)
    os.close(file)


def _lock(file: int, kind: int) -> bool:
    """Lock ``file`` without waiting. Returns False if another process holds the lock; always True in a file system without locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def clear_abandoned() -> None:
    """Remove the folders that killed servers of this user left behind. Blocks."""
    root = tempfile.gettempdir()
    with suppress(OSError):
        for name in filter(_FOLDER.fullmatch, os.listdir(root)):
            with suppress(OSError):  # the folder is a link, is in use, or belongs to another user
                _clear(os.path.join(root, name))


def _clear(folder: str) -> None:
    file = os.open(folder, _OPEN)
    try:
        found = os.fstat(file)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == stat.S_IRWXU:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(file)
