"""Calibration data in batches that can be iterated repeatedly."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.dataset import Dataset, SampleCall
from penstock.errors import InvalidArgument
from penstock.samples.open import Data, open_data
from penstock.tensor import Array, Signature


class CalibrationBatches:
    """The samples of ``data``, checked against ``signature``, in batches of at most ``batch_size`` samples of equal shapes
    (``Dataset.fitting``).

    If the model fixes the first axis of its inputs, that size replaces ``batch_size``. A sample that is a whole call is a batch.

    Raises the errors of ``open_data``, and InvalidArgument if ``batch_size`` is below 1.
    """

    def __init__(self, signature: Signature, data: Data | Dataset, batch_size: int) -> None:
        if batch_size < 1:
            raise InvalidArgument(f"the batch size must be at least 1, got {batch_size}", "give at least 1")
        self.data = open_data(data, signature, independent=True)
        self.smallest = signature.smallest_batch
        """The smallest batch that the model accepts."""
        is_free = all(spec.shape[:1] == (-1,) for spec in signature.inputs)
        self._size = self.data.fitting(batch_size) if is_free else self.smallest
        self.samples = list(self.data.call_samples(self._size))
        """The numbers of the samples in each batch."""
        self.count = len(self.samples)
        """Number of batches."""

    def __iter__(self) -> Iterator[SampleCall]:
        return self.data.calls(self._size)

    @property
    def largest(self) -> SampleCall:
        """The batch that needs the most memory."""
        return self.data.largest(self._size)

    def fewest(self) -> tuple[dict[str, Array], int]:
        """The inputs of the smallest batch that has samples of ``largest``, and the number of these samples."""
        samples = self.largest.samples[: self.smallest]
        return self.data.take(samples), len(samples)
