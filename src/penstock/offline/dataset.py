"""Dataset: samples for calibration or evaluation, checked against the model before anything long begins."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from penstock.errors import InvalidData, NotFound
from penstock.tensor import Array, DataType, Signature, TensorSpec

LABELS = "labels"
"""The name under which an npz file holds labels."""


class Dataset(msgspec.Struct, frozen=True):
    """Samples along the first axis of every input, in the model's order, with labels if there are any."""

    inputs: dict[str, Array]
    labels: Array | None
    digest: str

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(next(iter(self.inputs.values())))

    def rows(self, start: int, stop: int) -> dict[str, Array]:
        """Samples ``start`` to ``stop`` of every input."""
        return {name: array[start:stop] for name, array in self.inputs.items()}

    def split(self, held_out: float) -> tuple[Dataset, Dataset]:
        """All but the last share ``held_out``, and that share; at least one sample each."""
        cut = min(max(1, round(self.count * (1 - held_out))), self.count - 1)
        if cut < 1:
            raise InvalidData(
                "one sample cannot be split into calibration and evaluation data", "give at least two samples"
            )
        return self._part(0, cut), self._part(cut, self.count)

    def _part(self, start: int, stop: int) -> Dataset:
        return make_dataset(self.rows(start, stop), None if self.labels is None else self.labels[start:stop])


def load_dataset(path: str | Path, signature: Signature) -> Dataset:
    """Read an npz file whose arrays are named after the model's inputs, and ``labels``.

    Raises NotFound; InvalidData if the file is not an npz, lacks an input, or holds what the model cannot take.
    """
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InvalidData(f"'{path}' holds a single array, not an npz archive", "write it with numpy.savez")
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise NotFound(f"no data file '{path}'", "check the path") from None
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise InvalidData(
            f"cannot read '{path}': {error}", "write it with numpy.savez, without Python objects"
        ) from None
    labels = arrays.pop(LABELS, None) if LABELS not in signature.input_names else None
    try:
        return check_dataset(arrays, labels, signature)
    except InvalidData as error:
        raise InvalidData(f"'{path}': {error.message}", error.hint) from None


def check_dataset(arrays: Mapping[str, Array], labels: Array | None, signature: Signature) -> Dataset:
    """The arrays that ``signature`` names as a dataset; other arrays are left out. Raises InvalidData."""
    missing = [name for name in signature.input_names if name not in arrays]
    if missing:
        raise InvalidData(
            f"no array for input(s) {missing}; the file has {sorted(arrays)}",
            "name the arrays after the model's inputs",
        )
    inputs = {spec.name: _check_array(spec, arrays[spec.name]) for spec in signature.inputs}
    counts = {name: len(array) for name, array in inputs.items()}
    if labels is not None:
        counts[LABELS] = len(labels)
    if len(set(counts.values())) > 1:
        raise InvalidData(f"arrays differ in number of samples: {counts}", "give every array one row per sample")
    return make_dataset(inputs, labels)


def make_dataset(inputs: dict[str, Array], labels: Array | None) -> Dataset:
    """A dataset of arrays that are known to fit, with its digest."""
    digest = hashlib.sha256()
    for name, array in sorted({**inputs, **({} if labels is None else {LABELS: labels})}.items()):
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes())
    return Dataset(inputs, labels, digest.hexdigest())


def _check_array(spec: TensorSpec, array: Array) -> Array:
    datatype = DataType.from_numpy(array.dtype)
    if datatype is not spec.datatype:
        raise InvalidData(
            f"input '{spec.name}' is {spec.datatype.value}, but the data is {array.dtype}",
            f"save it as {spec.datatype.dtype}",
        )
    if array.ndim != len(spec.shape):
        raise InvalidData(
            f"input '{spec.name}' has {len(spec.shape)} dimensions {list(spec.shape)}, but the data has shape {list(array.shape)}",
            "the first axis counts samples",
        )
    if any(want not in (-1, got) for want, got in zip(spec.shape[1:], array.shape[1:], strict=True)):
        raise InvalidData(
            f"input '{spec.name}' has shape {list(spec.shape)}, but the data has shape {list(array.shape)}"
        )
    if len(array) == 0:
        raise InvalidData(f"input '{spec.name}' has no samples", "give at least one, better some hundred")
    if spec.shape[0] > 1 and len(array) % spec.shape[0]:
        raise InvalidData(
            f"the model takes exactly {spec.shape[0]} samples at a time, but the data has {len(array)}",
            f"give a multiple of {spec.shape[0]}",
        )
    if datatype.is_float:
        bad = ~np.isfinite(array.reshape(len(array), -1).astype(np.float64, copy=False)).all(axis=1)
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            raise InvalidData(
                f"input '{spec.name}' holds NaN or infinity in {int(bad.sum())} of {len(array)} samples, first in sample {first}",
                "clean the data",
            )
    return array.astype(spec.datatype.dtype, copy=False)
