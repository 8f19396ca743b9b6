"""What calibration found, kept on disk: the same model on the same data need not be run again.

A file is sealed (``sealed.py``) and named after its key, the digest of all that decides the histograms:
model, data, tensors, batch size, threads, the engine's version and the form of the file. One that is damaged, or of another
key, is as good as none, and is written anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime

from penstock.artifact import Artifact, sha256
from penstock.errors import InvalidArgument, InvalidData
from penstock.offline.compress.batches import Batches, Data
from penstock.offline.compress.checkpoint import read_sealed, write_sealed
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.ranges.histogram import Histogram, Range, TensorStatistics
from penstock.offline.compress.taps import Progress
from penstock.offline.optimize.model import self_contained
from penstock.offline.sessions import signature_of

_FORM = 1


class _Tensor(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    counts: bytes
    """4096 numbers, int64, little-endian."""
    zeros: int
    extremes: tuple[float, float]
    exponent: int
    clippable: bool
    fixed: Range | None


class _File(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    key: str
    tensors: dict[str, _Tensor]


def collect_cached(
    folder: Path,
    artifact: Artifact,
    data: Data,
    tensors: Sequence[str] | None = None,
    batch_size: int = 32,
    threads: int = 1,
    progress: Progress | None = None,
) -> dict[str, TensorStatistics]:
    """As ``collect``, or what it found before with the same arguments, from a file in ``folder``, which is made if need be.

    Raises as ``collect``; ResourceExhausted if the file cannot be written.
    """
    artifact = self_contained(artifact)
    key = _key(artifact, Batches(signature_of(artifact), data, batch_size).digest, tensors, batch_size, threads)
    path = folder / f"{key}.calibration"
    found = read_statistics(path, key)
    if found is None:
        found = collect(artifact, data, tensors, batch_size, threads, progress)
        write_statistics(path, key, found)
    return found


def read_statistics(path: Path, key: str) -> dict[str, TensorStatistics] | None:
    """What ``write_statistics`` wrote under ``key``; None if there is no such file, or it is damaged or of another key."""
    with contextlib.suppress(InvalidArgument, InvalidData, ValueError):  # of numpy, on odd lengths
        file = read_sealed(path, _File)
        if file is not None and file.key == key:
            return {name: _restored(tensor) for name, tensor in file.tensors.items()}
    return None


def write_statistics(path: Path, key: str, statistics: dict[str, TensorStatistics]) -> None:
    """Write ``statistics`` to ``path``, whole or not at all. Raises ResourceExhausted if the disk does not take them."""
    file = _File(key, {name: _kept(known) for name, known in statistics.items()})
    write_sealed(path, file, "the calibration cache")


def _key(artifact: Artifact, data: str, tensors: Sequence[str] | None, batch_size: int, threads: int) -> str:
    names = None if tensors is None else list(tensors)
    decides = [_FORM, onnxruntime.__version__, artifact.digest, data, names, batch_size, threads]
    return sha256(msgspec.json.encode(decides))


def _kept(known: TensorStatistics) -> _Tensor:
    histogram = known.histogram
    counts = histogram.counts.astype("<i8").tobytes()
    extremes = (histogram.min, histogram.max)
    return _Tensor(counts, histogram.zeros, extremes, histogram.exponent, known.clippable, known.fixed)


def _restored(tensor: _Tensor) -> TensorStatistics:
    counts = np.frombuffer(tensor.counts, "<i8")
    histogram = Histogram.restore(counts, tensor.zeros, tensor.extremes, tensor.exponent)
    return TensorStatistics(histogram, tensor.clippable, tensor.fixed)
