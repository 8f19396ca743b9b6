"""Fuzzes the reader of samples: npz archives, as a whole or as one array (``.npy``) that is packed into one."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np

from penstock.samples.open import load_dataset
from penstock.tensor import Array, DataType, Signature, TensorSpec
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import pieces
from tests.fuzz.target import DecoderTarget, attempt, contents

_SIGNATURES = (
    Signature((TensorSpec("x", DataType.FP32, (-1, 2)),), ()),
    Signature((TensorSpec("x", DataType.BYTES, (-1,)),), ()),
)
_ARRAYS: Sequence[Array] = (
    np.ones((4, 2), np.float32),
    np.asfortranarray(np.arange(8, dtype=">f4").reshape(4, 2)),
    np.array(["a", "bc"]),
    np.arange(3),
)
_NPY = b"\x93NUMPY"


def _npy(array: Array) -> Seed:
    target = io.BytesIO()
    np.save(target, array)
    data = target.getvalue()
    head = 10 + int.from_bytes(data[8:10], "little")
    return (data[:8], data[8:10], *pieces(data[10:head].rstrip() + b"\n", 9), *pieces(data[head:], 8))


class NpzTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"'shape': (1099511627776, 2)",
        b"'|O'",
        b"(-1,)",
        b"'<U9999999'",
        b"'<f2'",
        b"[('a','<i4')]",
        b"PK\x05\x06",
    )

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name, "data.npz")
        target = io.BytesIO()
        np.savez(target, x=_ARRAYS[0], labels=_ARRAYS[3], other=_ARRAYS[2])
        super().__init__([pieces(target.getvalue(), 24), *map(_npy, _ARRAYS)])

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        data = b"".join(parts)
        if data.startswith(_NPY):
            if random.random() < 0.7 and (end := data.find(b"\n")) > 10:
                data = data[:8] + (end + 1 - 10 & 0xFFFF).to_bytes(2, "little") + data[10:]
            target = io.BytesIO()
            with zipfile.ZipFile(target, "w") as archive:
                archive.writestr(zipfile.ZipInfo("x.npy"), data)
            data = target.getvalue()
        return data

    def decode(self, data: bytes) -> object:
        self._path.write_bytes(data)
        return [self._load(signature) for signature in _SIGNATURES]

    def _load(self, signature: Signature) -> object:
        return attempt(lambda: contents(load_dataset(self._path, signature).inputs["x"]))

    def close(self) -> None:
        self._folder.cleanup()
