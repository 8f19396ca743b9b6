"""A dataset: samples for calibration, training or evaluation, which are read when they are needed.

A sample is one call of the model: an array of any shape for each input. If the model has a batch axis, a sample is one row, and
samples of equal shapes can share a call. Only indices, shapes, digests and labels are in memory. ``samples/`` reads and checks data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from penstock.errors import InvalidData, Unsupported
from penstock.tensor import Array, DataType, to_wire

LABELS = "labels"
"""Name of the labels among the arrays of a sample, or of an npz file."""
DIGEST_BYTES = 16
_CALL_BYTES = 4 << 20
"""Maximum size of the inputs of one call, if it may have any number of rows. Activations are often many times larger."""
_MOST_SIZES = 3
"""Number of different calls in which samples of many sizes are timed."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a sample's arrays, by input."""


class SampleCall(NamedTuple):
    """The inputs of one call, and the numbers of its samples."""

    samples: Array
    inputs: dict[str, Array]


class SizedCall(NamedTuple):
    """A typical call, and the fraction of all samples that it stands for."""

    inputs: dict[str, Array]
    share: float = 1.0


class Sequences(NamedTuple):
    """The sequences of calls that the samples of a source form. The calls of a sequence have consecutive numbers."""

    states: Mapping[str, str]
    """The states among the inputs, and for each the output that returns its next value."""
    of: Array
    """For each sample, the number of its sequence."""


class Source(Protocol):
    """Reads samples by their numbers, which count from 0."""

    @property
    def kinds(self) -> Array:
        """For each sample, the index of its shapes in ``shapes``."""

    @property
    def shapes(self) -> Sequence[Shapes]:
        """The different shapes of samples."""

    @property
    def digests(self) -> Array:
        """A digest of the inputs of each sample, uint8 [samples, 16]."""

    def read(self, samples: Array) -> dict[str, Array]:
        """The given samples, which have equal shapes, stacked along a new first axis."""


class Stacked:
    """Samples of equal shapes in one array per input. The first axis counts samples. Memory-mapped arrays stay on disk."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = dict(arrays)
        self.kinds = np.zeros(len(next(iter(self._arrays.values()))), np.intp)
        self.shapes: Sequence[Shapes] = ({name: array.shape[1:] for name, array in self._arrays.items()},)

    @cached_property
    def digests(self) -> Array:
        found = np.empty((len(self.kinds), DIGEST_BYTES), np.uint8)
        for number, digest in enumerate(found):
            arrays = {name: array[number, ...] for name, array in self._arrays.items()}
            digest[:] = np.frombuffer(digest_of(arrays), np.uint8)
        return found

    def read(self, samples: Array) -> dict[str, Array]:
        is_slice = len(samples) > 0 and bool((np.diff(samples) == 1).all())
        chosen = slice(int(samples[0]), int(samples[-1]) + 1) if is_slice else samples
        return {name: np.asarray(array[chosen]) for name, array in self._arrays.items()}


class Separate:
    """Samples that ``load`` reads one at a time, with their kinds, shapes and digests."""

    def __init__(
        self, load: Callable[[int], dict[str, Array]], kinds: Array, shapes: Sequence[Shapes], digests: Array
    ) -> None:
        self._load, self.kinds, self.shapes, self.digests = load, kinds, shapes, digests

    def read(self, samples: Array) -> dict[str, Array]:
        found = [self._load(int(number)) for number in samples]
        for number, arrays in zip(samples, found, strict=True):
            if {name: array.shape for name, array in arrays.items()} != dict(self.shapes[self.kinds[number]]):
                raise InvalidData(f"sample {number} has changed since it was checked", "do not write to data in use")
        names = self.shapes[0]
        return {
            name: np.stack([one[name] for one in found]) if len(found) > 1 else found[0][name][np.newaxis]
            for name in names
        }


class Dataset:
    """Samples of a ``source``, with optional labels. ``joins`` is true if samples are rows, which can share a call."""

    def __init__(
        self,
        source: Source,
        labels: Array | None = None,
        *,
        joins: bool = True,
        order: Array | None = None,
        sequences: Sequences | None = None,
    ) -> None:
        """``order`` has the numbers of the samples in ``source``. By default, the dataset has all samples.

        If the samples form ``sequences``, the states among their inputs are those that the original model returned.
        """
        self._source, self.labels, self.joins, self._sequences = source, labels, joins, sequences
        self._order = np.arange(len(source.kinds)) if order is None else order

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(self._order)

    @property
    def states(self) -> Mapping[str, str]:
        """The states among the inputs, and the outputs that return them; empty unless the samples form sequences."""
        return self._sequences.states if self._sequences else {}

    @property
    def sequences(self) -> Array | None:
        """For each sample, the number of its sequence, from 0 without gaps; None unless the samples form sequences."""
        if self._sequences is None:
            return None
        return np.unique(self._sequences.of[self._order], return_inverse=True)[1]

    @property
    def units(self) -> int:
        """The number of independent parts: of sequences, or of samples."""
        found = self.sequences
        return self.count if found is None else int(found.max(initial=-1)) + 1

    @property
    def continues(self) -> Array:
        """For each sample, True if it is the call of a sequence that comes right after the sample before."""
        found = np.zeros(self.count, bool)
        if self._sequences is not None:
            found[1:] = (np.diff(self._order) == 1) & (np.diff(self._sequences.of[self._order]) == 0)
        return found

    @property
    def numbers(self) -> Array:
        """The numbers of the samples in the data that were given, for messages."""
        return self._order

    @property
    def names(self) -> list[str]:
        """The names of the inputs, in the model's order."""
        return list(self._source.shapes[0])

    @property
    def classes(self) -> Array | None:
        """The labels if there is one class number per sample, otherwise None."""
        labels = self.labels
        return labels if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu" else None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names, types, shapes and values of all samples, in order, and of the labels."""
        digest = hashlib.sha256(self.digests().tobytes())
        if self.labels is not None:
            digest.update(_description(LABELS, self.labels))
        return digest.hexdigest()

    def digests(self, *, labelled: bool = False) -> Array:
        """A digest of each sample, uint8 [samples, bytes]; of its inputs only, or of the inputs and the label."""
        found = self._source.digests[self._order]
        if not labelled or self.labels is None:
            return found
        labels = [digest_of({LABELS: np.asarray(label)}) for label in self.labels]
        return np.concatenate([found, np.frombuffer(b"".join(labels), np.uint8).reshape(self.count, -1)], axis=1)

    @property
    def stacks(self) -> bool:
        """True if all samples are rows of equal shapes, and form no sequences."""
        return self.joins and len(self._kinds) == 1 and self._sequences is None

    @property
    def sizes(self) -> int:
        """The number of different shapes of samples."""
        return len(self._kinds)

    @property
    def sample_bytes(self) -> float:
        """The mean size of a sample's inputs."""
        counts = np.bincount(self._source.kinds[self._order], minlength=len(self._source.shapes))
        return float(counts @ self._kind_bytes) / self.count

    @property
    def inputs(self) -> dict[str, Array]:
        """All samples in one array per input. Raises Unsupported unless ``stacks``."""
        self.check_stacks("this method")
        return self.rows(0, self.count)

    def check_stacks(self, who: str) -> None:
        """Raise Unsupported unless all samples are rows of equal shapes, which ``who`` needs."""
        if not self.stacks:
            cause = f"the data have samples of {self.sizes} sizes" if self.joins else "a sample is a whole call"
            cause = cause if self._sequences is None else "the samples form sequences"
            raise Unsupported(f"{who} needs rows of equal shapes, but {cause}", "quantise the model instead")

    def sample(self, number: int) -> dict[str, Array]:
        """The inputs of a call with one sample."""
        return self.take(np.array([number]))

    def rows(self, start: int, stop: int) -> dict[str, Array]:
        """Samples ``start`` to ``stop``, of equal shapes, in one call."""
        return self.take(np.arange(start, min(stop, self.count)))

    def take(self, samples: Array) -> dict[str, Array]:
        """The given samples, of equal shapes, in one call. If samples do not join, exactly one sample."""
        found = self._source.read(self._order[samples])
        if self.joins:
            return found
        assert len(samples) == 1
        return {name: array[0, ...] for name, array in found.items()}

    def calls(self, rows: int) -> Iterator[SampleCall]:
        """All samples once, in calls of at most ``rows`` samples of equal shapes, or of one sample if samples do not join."""
        for chosen in self.call_samples(rows):
            yield SampleCall(chosen, self.take(chosen))

    def call_samples(self, rows: int) -> Iterator[Array]:
        """The numbers of the samples in each of the ``calls``."""
        size = rows if self.joins else 1
        for members in [np.arange(self.count)] if size == 1 else self._kinds.values():
            for start in range(0, len(members), size):
                yield members[start : start + size]

    def fitting(self, rows: int, limit_bytes: int = _CALL_BYTES) -> int:
        """``rows``, or fewer if the inputs of a call with so many samples of the largest shape exceed ``limit_bytes``."""
        largest = max(int(self._kind_bytes[kind]) for kind in self._kinds)
        return min(rows, max(1, limit_bytes // max(1, largest)))

    def alike(self) -> Dataset:
        """The dataset with only the samples of the most frequent shapes."""
        return self if len(self._kinds) == 1 else self.pick(max(self._kinds.values(), key=len))

    def call(self, rows: int = 1) -> dict[str, Array]:
        """A call with ``rows`` samples of the most frequent shapes, repeated if there are too few."""
        return self._call(max(self._kinds.values(), key=len), rows)

    def largest(self, rows: int) -> SampleCall:
        """The call that needs the most memory, among ``calls``."""
        size = rows if self.joins else 1
        parts = {kind: members[:size] for kind, members in self._kinds.items()}
        chosen = parts[max(parts, key=lambda kind: len(parts[kind]) * self._kind_bytes[kind])]
        return SampleCall(chosen, self.take(chosen))

    def mix(self, rows: int = 1, most: int = _MOST_SIZES) -> list[SizedCall]:
        """At most ``most`` calls of ``rows`` samples that stand for all samples, smallest first.

        Each of the sizes has a call, in proportion to its samples. If there are too many sizes, they are divided into groups with
        about equally many samples, and each group has a call of its median size.
        """
        kinds = sorted(self._kinds, key=lambda kind: (self._kind_bytes[kind], kind))
        shares = np.array([len(self._kinds[kind]) for kind in kinds]) / self.count
        if len(kinds) <= most:
            return [
                SizedCall(self._call(self._kinds[kind], rows), float(s)) for kind, s in zip(kinds, shares, strict=True)
            ]
        group = np.minimum((np.cumsum(shares) - shares / 2) * most, most - 1).astype(np.intp)
        found = []
        for one in np.unique(group):
            members = np.flatnonzero(group == one)
            total = shares[members].sum()
            middle = members[np.searchsorted(np.cumsum(shares[members]), total / 2)]
            found.append(SizedCall(self._call(self._kinds[kinds[middle]], rows), float(total)))
        return found

    def split(self, held_out: float, multiple: int = 1) -> tuple[Dataset, Dataset]:
        """Split off the last fraction ``held_out`` of the samples. Returns the remaining samples, then the split-off samples. Both
        counts are positive multiples of ``multiple``.
        """
        parts = self.count // multiple
        self._check_splits(parts, multiple)
        cut = multiple * min(max(1, round(parts * (1 - held_out))), parts - 1)
        return self.part(0, cut), self.part(cut, self.count)

    def split_shuffled(self, held_out: float, multiple: int = 1, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Like ``split``, but splits off random samples, with nearly the same proportion of every class. Samples keep their order.

        If samples form sequences, splits off random sequences.
        """
        if (sequence := self.sequences) is not None:
            units = self.units
            self._check_splits(units, 1)
            chosen = np.random.default_rng(seed).permutation(units)[: min(max(1, round(units * held_out)), units - 1)]
            is_held = np.isin(sequence, chosen)
            return self.pick(np.flatnonzero(~is_held)), self.pick(np.flatnonzero(is_held))
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

    def pick(self, samples: Array) -> Dataset:
        """The dataset with only the given samples."""
        labels = None if self.labels is None else self.labels[samples]
        order = self._order[samples]
        return Dataset(self._source, labels, joins=self.joins, order=order, sequences=self._sequences)

    def pick_evenly(self, count: int) -> Dataset:
        """The dataset with only ``count`` evenly spaced samples."""
        return self.pick(np.linspace(0, self.count - 1, count).round().astype(np.intp))

    def few(self, most: int, multiple: int = 1) -> Dataset:
        """The dataset with at most ``most`` evenly spaced samples: a multiple of ``multiple``, but at least as many."""
        return self.pick_evenly(max(1, min(most, self.count) // multiple) * multiple)

    def part(self, start: int, stop: int) -> Dataset:
        """The dataset with only the samples ``start`` to ``stop``."""
        return self.pick(np.arange(start, min(stop, self.count)))

    def _call(self, members: Array, rows: int) -> dict[str, Array]:
        chosen = np.resize(members, rows) if self.joins else members[:1]
        return {name: np.ascontiguousarray(array) if array.ndim else array for name, array in self.take(chosen).items()}

    @cached_property
    def _kinds(self) -> dict[int, Array]:
        """The samples of each kind, in the order in which the kinds first appear."""
        kinds, first, which = np.unique(self._source.kinds[self._order], return_index=True, return_inverse=True)
        members = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])
        return {int(kinds[place]): members[place] for place in np.argsort(first)}

    @cached_property
    def _kind_bytes(self) -> Array:
        """The size in bytes of a sample of each kind of the source."""
        itemsizes = {name: array.dtype.itemsize for name, array in self.sample(0).items()}
        return np.array(
            [sum(itemsizes[name] * math.prod(shape) for name, shape in one.items()) for one in self._source.shapes]
        )

    def _check_splits(self, parts: int, multiple: int) -> None:
        if parts < 2:
            what = "sample" if self._sequences is None else "sequence"
            raise InvalidData(
                f"{self.units} {what}(s) cannot be split into calibration and evaluation data",
                f"give at least {2 * multiple} {what}s, or separate evaluation data",
            )


def make_dataset(inputs: Mapping[str, Array], labels: Array | None) -> Dataset:
    """Make a dataset from arrays that are already checked. Their first axis counts samples."""
    return Dataset(Stacked(inputs), labels)


def digest_of(arrays: Mapping[str, Array]) -> bytes:
    """A digest of the names, types, shapes and values of ``arrays``. The sign of a zero is not a value."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(arrays):
        digest.update(_description(name, arrays[name]))
    return digest.digest()


def _description(name: str, array: Array) -> bytes:
    is_text = array.dtype.hasobject or array.dtype.kind in "US"
    if array.dtype.kind == "f" or array.dtype == DataType.BF16.dtype:
        array = array + array.dtype.type(0)  # -0.0 becomes 0.0, which has other bytes
    values = repr(array.tolist()).encode() if is_text else bytes(to_wire(array))
    kind = "text" if is_text else array.dtype.newbyteorder("=")
    return f"{name} {kind} {array.shape};".encode() + values
