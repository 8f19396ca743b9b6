"""The configuration, and perhaps files, that a client sends to replace those of the repository.

Each process holds a shared lock on the folder of the files while it uses them. The last process to release it removes it. The
next server removes folders that a killed server has left.
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

from penstock.errors import InvalidArgument, PenstockError, ResourceExhausted

_FILE = "file:"
_MAX_FILES = 1000
_MAX_DEPTH = 8
_MAX_NAME = 255
_FOLDER = re.compile(r"penstock-model-[a-z0-9_]{8}")
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_held: dict[str, int] = {}
"""By folder that this process uses, the file that its lock is on."""
_PART = re.compile(r"[^/\\\x00-\x1f\x7f]+")


class Override(msgspec.Struct, frozen=True):
    """Plain data, so that all processes of a server can be told."""

    config: str
    """The whole configuration, as JSON."""
    folder: str = ""
    """A private folder used instead of the repository's; empty: that one."""


def read_parameters(name: str, parameters: Mapping[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    """What the parameters of a request to load model ``name`` say: the configuration, and files by path in the model's folder.

    Raises InvalidArgument, and PenstockError for a name that is too long for a file.
    """
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key.startswith(_FILE):
            if not isinstance(value, bytes):
                raise InvalidArgument(f"parameter '{key[:80]}' to load model '{name}' must hold bytes")
            files[_checked(key.removeprefix(_FILE), name)] = value
        elif key != "config":
            raise InvalidArgument(
                f"there is no parameter '{key[:80]}' to load model '{name}'", "'config', 'file:<path>'"
            )
    config = parameters.get("config")
    if config is not None and not isinstance(config, str):
        raise InvalidArgument(f"parameter 'config' to load model '{name}' must be a string that holds JSON")
    if files and config is None:
        raise InvalidArgument(
            f"files to load model '{name}' with need its configuration too",
            "give the parameter 'config', or '{}' for none",
        )
    if len(files) > _MAX_FILES:
        raise InvalidArgument(f"more than {_MAX_FILES} files to load model '{name}' with")
    return config, files


def _checked(path: str, name: str) -> str:
    parts = path.split("/")
    if any(len(part.encode()) > _MAX_NAME for part in parts):  # which clients know as a failure of the repository
        raise PenstockError(
            f"failed to load '{name}', failed to poll from model repository: '{_FILE}{path[:80]}' is too long",
            f"at most {_MAX_NAME} bytes for a file's name",
        )
    if len(parts) > _MAX_DEPTH or any(part.startswith(".") or not _PART.fullmatch(part) for part in parts):
        raise InvalidArgument(
            f"'{_FILE}{path[:80]}' names no file in the folder of model '{name}'", "write e.g. 'file:1/model.onnx'"
        )
    return path


def store(files: Mapping[str, bytes]) -> Path:
    """A new private folder that holds ``files``, in use until ``discard``. Raises InvalidArgument, ResourceExhausted. Blocks."""
    try:
        while not hold(folder := tempfile.mkdtemp(prefix="penstock-model-")):
            pass  # a server that starts took it for one that was left
    except OSError as error:
        raise _no_room(error) from None
    try:
        for path, data in files.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    except BaseException as error:
        discard(folder)
        if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
            raise InvalidArgument("one of the files to load is the folder of another") from None
        if isinstance(error, OSError):
            raise _no_room(error) from None
        raise
    return Path(folder)


def _no_room(error: OSError) -> ResourceExhausted:
    return ResourceExhausted(f"the files to load cannot be kept: {error.strerror}")


def hold(folder: str) -> bool:
    """Have ``folder`` count as in use by this process until ``discard``; whether it is there."""
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
    """This process no longer uses ``folder``, which goes unless another does. Blocks."""
    if not hold(folder):
        return
    file = _held.pop(folder)
    if _lock(file, fcntl.LOCK_EX):  # otherwise the shared one is given up
        shutil.rmtree(folder, ignore_errors=True)
    os.close(file)


def _lock(file: int, kind: int) -> bool:
    """Whether nobody else's lock stands against it; there is none in a file system without locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def clear_abandoned() -> None:
    """Remove the folders that servers of this user have left when they were killed. Blocks."""
    root = tempfile.gettempdir()
    with suppress(OSError):
        for name in filter(_FOLDER.fullmatch, os.listdir(root)):
            with suppress(OSError):  # it is a link, somebody else's, or in use
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
