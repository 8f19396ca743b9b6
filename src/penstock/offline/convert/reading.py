"""Reads the files of sources."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import InvalidModel, NotFound


def read_file(path: Path, what: str = "model file", hint: str = "check the path", limit: int = 0) -> bytes:
    """The content of ``path``, which is a ``what``. Raises NotFound, InvalidModel if it is empty or exceeds ``limit`` bytes."""
    try:
        if limit and path.stat().st_size > limit:
            raise InvalidModel(f"'{path.name}' is larger than {limit >> 20} MiB", "check the path")
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"no {what} '{path}'", hint) from None
    except OSError as error:
        raise InvalidModel(f"the {what} '{path}' cannot be read: {error.strerror}") from error
    if not data:
        raise InvalidModel(f"the {what} '{path.name}' is empty", "save the model again")
    return data
