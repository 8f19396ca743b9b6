"""Checkpoint files: a SHA-256 digest followed by MessagePack data, which may contain arrays.

They store training progress, rounds of a long run, and a teacher's outputs. A truncated or modified file is rejected.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.artifact import Artifact, ProvenanceStep
from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.storage.atomic import write_whole

_DIGEST_BYTES = 32
_MAX_ARRAY_BYTES = (1 << 32) - 1
"""MessagePack's limit on the bytes of one value."""
T = TypeVar("T")


class _Model(msgspec.Struct, frozen=True):
    data: bytes
    provenance: tuple[ProvenanceStep, ...]


class _Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data: bytes


def write_checkpoint(path: Path, contents: object, what: str = "") -> None:
    """Write ``contents`` (plain data, structs, arrays of numbers) to ``path`` atomically. Missing folders are created.

    Raises ResourceExhausted. ``what`` names the contents in the error message.
    """
    payload = msgspec.msgpack.encode(contents, enc_hook=_pack)
    write_whole(path, hashlib.sha256(payload).digest(), payload, what=what, durable=True)


def read_checkpoint(path: Path, kind: type[T]) -> T | None:
    """The contents of a checkpoint, decoded as ``kind``; None if the file does not exist. Reading takes twice the file's size in
    memory.

    Raises InvalidArgument if the file is damaged, truncated, or of another kind.
    """
    try:
        data = memoryview(path.read_bytes())
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]:
            return msgspec.msgpack.decode(data[_DIGEST_BYTES:], type=kind, dec_hook=_unpack)
    except FileNotFoundError:
        return None
    # msgspec raises ValueError, and so does numpy for invalid types and shapes.
    except (OSError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise _damaged(path) from error
    raise _damaged(path)


def write_model(path: Path, model: Artifact) -> None:
    """Write ``model`` and its provenance to ``path`` atomically. Raises ResourceExhausted."""
    write_checkpoint(path, _Model(model.data, model.provenance), "a model")


def read_model(path: Path) -> Artifact | None:
    """The model in a checkpoint; None if the file does not exist. Raises InvalidArgument if it is damaged."""
    found = read_checkpoint(path, _Model)
    return Artifact.from_bytes(found.data, provenance=found.provenance) if found else None


def _damaged(path: Path) -> InvalidArgument:
    return InvalidArgument(f"'{path}' is damaged, or not a file of Penstock", "delete it to start again")


def _pack(value: object) -> _Array:
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise NotImplementedError(f"{type(value).__name__} cannot be stored")
    if value.nbytes > _MAX_ARRAY_BYTES:
        raise ResourceExhausted(
            f"an array of {value.nbytes >> 30} GiB is too large for a checkpoint", "give fewer samples, or no folder"
        )
    plain: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data  # no copy
    return _Array(value.dtype.str, list(value.shape), plain)


def _unpack(_kind: type, value: object) -> Any:
    packed = msgspec.convert(value, _Array)
    return np.frombuffer(packed.data, np.dtype(packed.dtype)).reshape(packed.shape)
