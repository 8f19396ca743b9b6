"""Arrays on disk that are taken back only if they are whole and of the same origin: checkpoints, a teacher's answers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.tensor import Array

_ABOUT, _DIGEST = "__about__", "__sha256__"


def write_archive(path: Path, arrays: Mapping[str, Array], about: Mapping[str, object]) -> None:
    """Write ``arrays`` (numbers only) and ``about`` (plain data) to the npz file ``path``, whole or not at all.

    Raises ResourceExhausted if the disk does not take it.
    """
    note = np.frombuffer(msgspec.json.encode(about, order="sorted"), np.uint8)
    members = {**arrays, _ABOUT: note}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.savez(file, **members, **{_DIGEST: np.frombuffer(_digest(members), np.uint8)})  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise ResourceExhausted(f"cannot write '{path}': {error.strerror or error}", "choose another place") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def read_archive(path: Path) -> tuple[dict[str, Array], dict[str, object]] | None:
    """The arrays of ``path`` and what it says of them; None if there is no such file.

    Raises InvalidArgument if it is not what ``write_archive`` wrote: damaged, truncated, or of another making.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            members = {name: archive[name] for name in archive.files}
        digest, about = members.pop(_DIGEST).tobytes(), members[_ABOUT].tobytes()
        if digest == _digest(members):
            del members[_ABOUT]
            return members, msgspec.json.decode(about, type=dict[str, object])
    except FileNotFoundError:
        return None
    # What numpy, zipfile and msgspec raise on files that are damaged or made up; MemoryError is a shape that lies.
    except (ValueError, KeyError, AttributeError, TypeError, EOFError, OSError, RuntimeError, MemoryError) as error:
        raise _damaged(path) from error
    except (zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(path) from error
    raise _damaged(path)


def _damaged(path: Path) -> InvalidArgument:
    return InvalidArgument(f"'{path}' is damaged, or not a file of Penstock's", "delete it to start afresh")


def _digest(members: Mapping[str, Array]) -> bytes:
    digest = hashlib.sha256()
    for name, array in sorted(members.items()):
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()
