"""Calibration data in batches that can be iterated repeatedly."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

from penstock.dataset import Dataset, check_dataset
from penstock.errors import InvalidArgument, InvalidData, Unsupported
from penstock.tensor import Array, Signature

Data = Dataset | Mapping[str, Array] | Iterable[Mapping[str, Array]]
"""A mapping from input names to arrays with samples along the first axis, or an iterable of such mappings. The mappings may differ in
their free dimensions. The iterable must start at the beginning each time, as a list does."""


class CalibrationBatches:
    """Batches of at most ``batch_size`` samples of ``data``, as views. The data are checked against ``signature``.

    If the model fixes the first axis of its inputs, that size replaces ``batch_size``. Arrays that are not inputs are ignored.
    The batches of an iterable are checked at construction and again in each pass.

    Raises InvalidData if the data are empty or do not fit the signature, InvalidArgument if ``data`` is an iterator.
    """

    def __init__(self, signature: Signature, data: Data, batch_size: int) -> None:
        if batch_size < 1:
            raise InvalidArgument(f"the batch size must be at least 1, got {batch_size}", "give at least 1")
        fixed = {spec.shape[0] for spec in signature.inputs if spec.shape and spec.shape[0] > 0}
        if len(fixed) > 1:
            raise Unsupported(f"the inputs' first axes are fixed to different sizes: {sorted(fixed)}")
        self._signature = signature
        self._size = max(fixed, default=batch_size)
        self.smallest = max(fixed, default=1)
        """The smallest batch that the model accepts."""
        self._parts: Iterable[Mapping[str, Array]] | Dataset
        if isinstance(data, Dataset):
            data = data.inputs
        if isinstance(data, Mapping):
            self._parts = self._check(data)
        elif iter(data) is data:
            raise InvalidArgument(
                "the calibration data are an iterator, which allows only one pass; calibration needs several",
                "give a list, or an object whose __iter__ starts at the beginning each time",
            )
        else:
            self._parts = data
        self._survey()

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for part in self._datasets():
            for start in range(0, part.count, self._size):
                yield part.rows(start, start + self._size)

    def _survey(self) -> None:
        self.count = 0
        """Number of batches."""
        self.largest: dict[str, Array] = {}
        """The batch that needs the most memory."""
        digest, most = hashlib.sha256(), -1
        for part in self._datasets():
            digest.update(part.digest.encode())
            self.count += -(-part.count // self._size)
            batch = part.rows(0, self._size)
            size = sum(array.nbytes for array in batch.values())
            if size > most:
                most, self.largest = size, batch
        if not self.count:
            raise InvalidData("there are no calibration batches", "give a few hundred samples")
        self.digest = digest.hexdigest()
        """SHA-256 of names, types, shapes and values, in order."""

    def _datasets(self) -> Iterator[Dataset]:
        if isinstance(self._parts, Dataset):
            yield self._parts
            return
        for number, part in enumerate(self._parts):
            try:
                yield self._check(part)
            except InvalidData as error:
                raise InvalidData(f"calibration batch {number}: {error.message}", error.hint) from None

    def _check(self, arrays: Mapping[str, Array]) -> Dataset:
        named = {name: arrays[name] for name in self._signature.input_names if name in arrays}
        return check_dataset(named, self._signature)
