"""What a client who loads a model puts in place of what its repository says: a configuration, and perhaps files."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import InvalidArgument, PenstockError, ResourceExhausted

_FILE = "file:"
_MAX_FILES = 1000
_MAX_DEPTH = 8
_MAX_NAME = 255
_PART = re.compile(r"[^/\\\x00-\x1f\x7f]+")


class Override(msgspec.Struct, frozen=True):
    """Plain data, so that all processes of a server can be told."""

    config: str
    """The whole configuration, as JSON."""
    folder: str = ""
    """A private folder used instead of the repository's; empty: that one."""
    owner: int = 0
    """The process that removes the folder when it no longer serves from it."""


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
    """A new private folder that holds ``files``, for ``discard``. Raises InvalidArgument, ResourceExhausted. Blocks."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-model-"))
    try:
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
            raise InvalidArgument("one of the files to load is the folder of another") from None
        if isinstance(error, OSError):
            raise ResourceExhausted(f"the files to load cannot be kept: {error.strerror}") from None
        raise
    return folder


def discard(override: Override | None) -> None:
    """Give back what ``override`` takes on the disk. Blocks."""
    if override is not None and override.folder:
        shutil.rmtree(override.folder, ignore_errors=True)
