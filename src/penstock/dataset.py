"""A dataset: samples for calibration or evaluation, checked against the model before any expensive step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from penstock.artifact import local_path
from penstock.errors import InvalidData, NotFound, PenstockError
from penstock.tensor import Array, DataType, Signature, TensorSpec, to_wire

LABELS = "labels"
"""Name of the array of labels in an npz file."""

_ROWS = 256
"""Number of samples to check at a time, which limits the memory of the check."""

_MAGICS = b"\x93NUMPY", b"PK"
"""First bytes of an npy file (a single array) and of an npz file. numpy would unpickle any other file."""

_MAX_CODE = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)

_SAVE = "write the file with numpy.savez, without Python objects"


class Dataset(msgspec.Struct, frozen=True):
    """Samples for every input, in the model's order, with optional labels. The first axis of each array counts the samples."""

    inputs: dict[str, Array]
    labels: Array | None
    digest: str

    @property
    def classes(self) -> Array | None:
        """The labels if there is one class number per sample, otherwise None."""
        labels = self.labels
        return labels if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu" else None

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(next(iter(self.inputs.values())))

    def rows(self, start: int, stop: int) -> dict[str, Array]:
        """Samples ``start`` to ``stop`` of every input."""
        return {name: array[start:stop] for name, array in self.inputs.items()}

    def split(self, held_out: float, multiple: int = 1) -> tuple[Dataset, Dataset]:
        """Split off the last fraction ``held_out`` of the samples. Returns the remaining samples, then the split-off samples. Both
        counts are positive multiples of ``multiple``.
        """
        parts = self.count // multiple
        self._check_splits(parts, multiple)
        cut = multiple * min(max(1, round(parts * (1 - held_out))), parts - 1)
        return self._part(0, cut), self._part(cut, self.count)

    def split_shuffled(self, held_out: float, multiple: int = 1, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Like ``split``, but splits off random samples, with nearly the same proportion of every class. Samples keep their order."""
        blocks = self.count // multiple
        self._check_splits(blocks, multiple)
        order = np.random.default_rng(seed).permutation(self.count)
        if (classes := self.classes) is not None:
            order = order[np.argsort(classes[order], kind="stable")]
        size = multiple * min(max(1, round(blocks * held_out)), blocks - 1)
        is_held = np.zeros(self.count, bool)
        is_held[order[((np.arange(size) + 0.5) * self.count / size).astype(np.intp)]] = True
        rest = np.flatnonzero(~is_held)
        return self.pick(rest[: len(rest) - len(rest) % multiple]), self.pick(np.flatnonzero(is_held))

    def split_evenly(self, period: int, multiple: int = 1) -> tuple[Dataset, Dataset]:
        """Split off every ``period``-th block of ``multiple`` samples. Returns the remaining samples, then the split-off samples.

        Both parts represent the data even if the data are sorted. Raises InvalidData if there are fewer than two blocks.
        """
        blocks = self.count // multiple
        self._check_splits(blocks, multiple)
        period = min(period, blocks)
        is_held = np.repeat(np.arange(blocks) % period == period - 1, multiple)
        return self.pick(np.flatnonzero(~is_held)), self.pick(np.flatnonzero(is_held))

    def pick(self, rows: Array) -> Dataset:
        """A copy that contains only the samples at the indices ``rows``."""
        labels = None if self.labels is None else self.labels[rows]
        return make_dataset({name: array[rows] for name, array in self.inputs.items()}, labels)

    def pick_evenly(self, count: int) -> Dataset:
        """A copy of ``count`` evenly spaced samples."""
        return self.pick(np.linspace(0, self.count - 1, count).round().astype(np.intp))

    def _check_splits(self, parts: int, multiple: int) -> None:
        if parts < 2:
            raise InvalidData(
                f"{self.count} sample(s) cannot be split into calibration and evaluation data",
                f"give at least {2 * multiple} samples, or separate evaluation data",
            )

    def _part(self, start: int, stop: int) -> Dataset:
        return make_dataset(self.rows(start, stop), None if self.labels is None else self.labels[start:stop])


def load_dataset(path: str | Path, signature: Signature) -> Dataset:
    """Read an npz file whose arrays are named after the model's inputs, with an optional array ``labels``.

    Raises NotFound, and InvalidData if the file is not an npz file, lacks an input, or does not fit the model.
    """
    path = local_path(path)
    try:
        if path.is_fifo():  # opening it would wait for a writer
            raise InvalidData(f"cannot read '{path}': it is a pipe, in which numpy cannot seek", _SAVE)
        # Open the file here, because numpy does not close its own file if the archive is damaged.
        with path.open("rb") as file:
            if not file.read(len(_MAGICS[0])).startswith(_MAGICS):
                raise InvalidData(f"cannot read '{path}': it is not an npz file", _SAVE)
            file.seek(0)
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InvalidData(f"'{path}' contains a single array, not an npz archive", "write it with numpy.savez")
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise NotFound(f"no data file '{path}'", "check the path") from None
    except PenstockError:
        raise
    except Exception as error:  # noqa: BLE001 - numpy and zipfile raise arbitrary exceptions for damaged or forged files
        raise InvalidData(f"cannot read '{path}': {error}", _SAVE) from None
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise InvalidData(f"'{path}' is a zip archive, but not of numpy arrays", "write it with numpy.savez")
    try:
        return check_dataset(arrays, signature)
    except InvalidData as error:
        raise InvalidData(f"'{path}': {error.message}", error.hint) from None


def check_dataset(arrays: Mapping[str, Array], signature: Signature) -> Dataset:
    """Make a dataset from the arrays for the inputs of ``signature`` and the array ``labels``, if present. Raises InvalidData."""
    labels = arrays.get(LABELS) if LABELS not in signature.input_names else None
    missing = [name for name in signature.input_names if name not in arrays]
    if missing:
        raise InvalidData(
            f"no array for input(s) {missing}; the file has {sorted(arrays)}",
            "name the arrays after the model's inputs",
        )
    inputs = {spec.name: _check_array(spec, arrays[spec.name]) for spec in signature.inputs}
    counts = {name: len(array) for name, array in inputs.items()}
    if labels is not None:
        labels = _check_labels(labels)
        counts[LABELS] = len(labels)
    if len(set(counts.values())) > 1:
        raise InvalidData(f"arrays differ in number of samples: {counts}", "give every array one row per sample")
    return make_dataset(inputs, labels)


def make_dataset(inputs: dict[str, Array], labels: Array | None) -> Dataset:
    """Make a dataset from arrays that are already checked, and compute its digest."""
    digest = hashlib.sha256()
    for name, array in sorted({**inputs, **({} if labels is None else {LABELS: labels})}.items()):
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else to_wire(array))
    return Dataset(inputs, labels, digest.hexdigest())


def _check_labels(labels: Array) -> Array:
    """Labels with one row per sample, of numbers or text; a second axis of length 1 is dropped."""
    flat = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if flat.ndim == 0 or 0 in flat.shape[1:] or flat.dtype.kind not in "iufbSU":
        raise InvalidData(
            f"labels must be numbers or text, one row per sample, but have shape {list(labels.shape)} and type {labels.dtype}",
            "omit labels if there are none",
        )
    if flat.dtype.kind == "f" and _not_finite(flat).any():
        raise InvalidData("labels contain NaN or infinity", "remove these samples, or replace the values")
    if flat.ndim == 1 and flat.dtype.kind == "i" and flat.min(initial=0) < 0:
        first = int(np.flatnonzero(flat < 0)[0])
        raise InvalidData(
            f"labels must not be negative, because classes are numbered from 0, but the label at index {first} is {flat[first]}",
            "remove samples whose label is padding, number the classes from 0, or save the numbers of a regression as floats",
        )
    return flat


def _check_array(spec: TensorSpec, array: Array) -> Array:
    if not spec.shape:
        raise InvalidData(
            f"input '{spec.name}' is a single number, with no axis for samples",
            "export the model with that input as a constant",
        )
    # npy files have no name for bfloat16, so numpy reads the elements as 16-bit void.
    if spec.datatype is DataType.BF16 and array.dtype.str[1:] == "V2":
        array = array.view(spec.datatype.dtype)
    if not _holds(array, spec.datatype):
        raise InvalidData(
            f"input '{spec.name}' is {spec.datatype.value}, but the data is {array.dtype}",
            f"save it as {'text' if spec.datatype is DataType.BYTES else spec.datatype.dtype}",
        )
    if array.ndim != len(spec.shape):
        no_batch = array.ndim == len(spec.shape) + 1
        raise InvalidData(
            f"input '{spec.name}' has {len(spec.shape)} dimension(s) {list(spec.shape)}, but the data has shape {list(array.shape)}",
            "the model has no axis for samples: export it with a batch axis"
            if no_batch
            else "the first axis counts samples",
        )
    if any(want not in (-1, got) for want, got in zip(spec.shape[1:], array.shape[1:], strict=True)):
        raise InvalidData(
            f"input '{spec.name}' has shape {list(spec.shape)}, but the data has shape {list(array.shape)}",
            "the first axis counts samples; the other axes must match the model's",
        )
    if len(array) == 0:
        raise InvalidData(f"input '{spec.name}' has no samples", "give at least one sample, preferably several hundred")
    if spec.shape[0] > 1 and len(array) % spec.shape[0]:
        raise InvalidData(
            f"the model takes exactly {spec.shape[0]} samples at a time, but the data has {len(array)}",
            f"give a multiple of {spec.shape[0]}",
        )
    if spec.datatype.is_float:
        bad = np.concatenate([_not_finite(array[at : at + _ROWS]) for at in range(0, len(array), _ROWS)])
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            raise InvalidData(
                f"input '{spec.name}' contains NaN or infinity in {int(bad.sum())} of {len(array)} samples, first in sample {first}",
                "remove these samples, or replace the values",
            )
    if array.dtype.kind == "U" and array.dtype.itemsize:
        codes = np.ascontiguousarray(array).view(np.dtype("u4").newbyteorder(array.dtype.byteorder))
        if ((codes > _MAX_CODE) | (codes - _SURROGATES.start < len(_SURROGATES))).any():
            raise InvalidData(f"input '{spec.name}' contains text that is not valid Unicode", "save it again as text")
    return array.astype(spec.datatype.dtype, copy=False)


def _not_finite(rows: Array) -> Array:
    return np.asarray(~np.isfinite(rows.reshape(len(rows), -1)).all(axis=1))


def _holds(array: Array, datatype: DataType) -> bool:
    """True if the elements of ``array`` have type ``datatype``, in any byte order; text counts as BYTES."""
    if datatype is DataType.BYTES:
        return array.dtype.kind in "OSU"
    return array.dtype.newbyteorder("=") == datatype.dtype
