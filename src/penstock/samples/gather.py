"""Makes a dataset of samples that arrive one by one, each a mapping from names to arrays."""

from __future__ import annotations

import hashlib
import itertools
from array import array as numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.dataset import DIGEST_BYTES, LABELS, Dataset, Separate, Sequences, Shapes, digest_of
from penstock.errors import InvalidData
from penstock.samples.hints import InputHints
from penstock.samples.sequences import Feeder, check_states, has_sequences
from penstock.samples.stacked import check_names
from penstock.samples.values import check_finite, check_labels, from_python, typed
from penstock.tensor import Array, Signature, TensorSpec

_WHOLE = -1
"""Stands for the row of a sample that is a whole call."""
_PADDING = -1
"""The class number of padding. Metrics of classes per element skip it."""


class Gathering:
    """Checks samples against ``signature``. Remembers their sizes, digests and labels, but not their values.

    A sample has the inputs of one call. If the model has a batch axis, the sample may lack it, and stands for one row. A call of
    several rows counts as several samples if its rows are known to be ``independent``.

    If the first sample says to which sequence it belongs, all do, and their states are made with ``hints``.
    """

    def __init__(self, signature: Signature, *, independent: bool, hints: InputHints | None = None) -> None:
        self._signature = signature
        self._hints, self._feeder = hints, Feeder(signature, hints) if hints else None
        self._is_expanded = signature.has_rows and (independent or signature.smallest_batch > 1)
        self._calls, self._rows, self._kinds = numbers("q"), numbers("q"), numbers("q")
        self._known: dict[tuple[tuple[int, ...], ...], int] = {}
        self._digests = bytearray()
        self._labels: list[Array] = []
        self._count = 0
        self._is_single = True
        """True if every call so far has one row."""

    def call_of(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """The inputs of one call, from the arrays or Python values of a sample. Raises InvalidData."""
        check_names(arrays, self._signature)
        inputs = {
            spec.name: self._fitting(spec, from_python(spec, arrays[spec.name])) for spec in self._signature.inputs
        }
        if self._signature.has_rows:
            rows = {name: len(array) for name, array in inputs.items()}
            if len(set(rows.values())) > 1:
                raise InvalidData(f"inputs differ in number of rows: {rows}", "give a call of the model, or one row")
            if 0 in rows.values():
                raise InvalidData("the sample has no rows", "remove it")
        return inputs

    def add(self, arrays: Mapping[str, Any], place: str) -> dict[str, Array]:
        """Check one sample, and return the inputs of its call. Errors name its ``place``. Raises InvalidData."""
        if not self._count and not has_sequences(arrays, self._signature, self._hints):
            self._feeder = None
        try:
            if self._feeder:
                self._is_expanded = False
                arrays = self._feeder.fill(arrays)
            else:
                check_states(arrays, self._hints)
            inputs = self.call_of(arrays)
            rows = len(next(iter(inputs.values()))) if self._signature.has_rows else 1
            is_single = self._signature.has_rows and rows == 1
            for spec in self._signature.inputs:
                check_finite(spec, inputs[spec.name][np.newaxis], self._hints)
            self._add_labels(arrays, rows)
            if self._feeder:
                self._feeder.advance(inputs)
        except InvalidData as error:
            raise InvalidData(f"{place}: {error.message}", error.hint) from None
        self._is_single &= is_single
        for row in range(rows) if self._is_expanded else [0 if is_single else _WHOLE]:
            self._add(inputs if row == _WHOLE else {name: array[row, ...] for name, array in inputs.items()}, row)
        self._count += 1
        return inputs

    def finish(self, load: Callable[[int], dict[str, Array]], what: str) -> Dataset:
        """The dataset. ``load`` returns the inputs of a call by its number, in the order of ``add``. ``what`` names the data.

        Raises InvalidData.
        """
        if not self._count:
            raise InvalidData(f"{what} has no samples", "give at least one sample, preferably several hundred")
        joins = self._is_expanded or self._is_single
        calls, rows = np.array(self._calls, np.intp), np.array(self._rows, np.intp)
        if not joins:
            rows[:] = _WHOLE
            self._unite_kinds()
        names = self._signature.input_names
        shapes: list[Shapes] = [dict(zip(names, known, strict=True)) for known in self._known]
        if self._signature.smallest_batch > 1 and len(shapes) > 1:
            raise InvalidData(
                f"the model takes exactly {self._signature.smallest_batch} samples at a time, but samples of {what} have "
                f"{len(shapes)} different shapes",
                "give samples of equal shapes, or export the model with a free batch axis",
            )

        def read(number: int) -> dict[str, Array]:
            inputs, row = load(int(calls[number])), int(rows[number])
            if row == _WHOLE:
                return inputs
            if any(len(array) <= row for array in inputs.values()):
                raise InvalidData(f"{what} has changed since it was checked", "do not write to data in use")
            return {name: array[row, ...] for name, array in inputs.items()}

        digests = np.frombuffer(bytes(self._digests), np.uint8).reshape(len(calls), -1)
        try:
            labels = self._all_labels(len(calls))
        except InvalidData as error:
            raise InvalidData(f"{what}: {error.message}", error.hint) from None
        sequences = None
        if self._feeder and self._hints:
            sequences = Sequences(self._hints.states, np.array(self._feeder.numbers, np.intp))
            digests = _digests_in_sequences(digests, sequences.of)
        source = Separate(read, np.array(self._kinds, np.intp), shapes, digests)
        return Dataset(source, labels, joins=joins, sequences=sequences)

    def _unite_kinds(self) -> None:
        """Give calls of one row the shapes of calls, because other calls have several rows."""
        united: dict[tuple[tuple[int, ...], ...], int] = {}
        rank, places = len(self._signature.inputs[0].shape), []
        for known in self._known:
            is_row = self._signature.has_rows and len(known[0]) < rank
            shapes = tuple((1, *shape) for shape in known) if is_row else known
            places.append(united.setdefault(shapes, len(united)))
        self._kinds = numbers("q", [places[kind] for kind in self._kinds])
        self._known = united

    def _add(self, arrays: Mapping[str, Array], row: int) -> None:
        shapes = tuple(array.shape for array in arrays.values())
        self._calls.append(self._count)
        self._rows.append(row)
        self._kinds.append(self._known.setdefault(shapes, len(self._known)))
        self._digests += digest_of(arrays)

    def _fitting(self, spec: TensorSpec, array: Array) -> Array:
        array = typed(spec, array)
        if self._signature.has_rows and array.ndim == len(spec.shape) - 1:
            array = array[np.newaxis]
        # Rows are joined to calls of the size that the model takes.
        is_row = array.shape[:1] == (1,) and self._signature.smallest_batch > 1
        if not spec.admits((spec.shape[0], *array.shape[1:]) if is_row else array.shape):
            raise InvalidData(
                f"input '{spec.name}' has shape {list(spec.shape)}, but the sample has shape {[*array.shape]}",
                "a sample is one call of the model; -1 stands for any size"
                if -1 in spec.shape
                else "give samples of this shape, or export the model with free axes",
            )
        return array

    def _add_labels(self, arrays: Mapping[str, Any], rows: int) -> None:
        """Remember the label of the sample, or a label for each row."""
        if LABELS in self._signature.input_names:
            return
        if (LABELS in arrays) != bool(self._labels) and self._count:
            raise InvalidData("some samples have labels, and some have none", "give every sample labels, or none")
        if LABELS not in arrays:
            return
        try:
            label = np.asarray(arrays[LABELS])
        except ValueError:
            raise InvalidData("the labels have lists of different lengths", "give lists of equal lengths") from None
        is_expanded = self._is_expanded and rows > 1
        if is_expanded and label.shape[:1] != (rows,):
            raise InvalidData(
                f"the sample has {rows} rows, but labels of shape {list(label.shape)}", "give one label per row"
            )
        if self._signature.has_rows and rows == 1 and label.ndim > 1 and len(label) == 1:
            label = label[0]  # the labels have the batch axis, too
        self._labels += list(label) if is_expanded else [label]

    def _all_labels(self, count: int) -> Array | None:
        if not self._labels:
            return None
        assert len(self._labels) == count
        labels = [np.asarray(label) for label in self._labels]
        if any(label.ndim == 0 for label in labels):
            labels = [label.reshape(()) if label.shape == (1,) else label for label in labels]
        shapes = {label.shape for label in labels}
        if len(shapes) == 1:
            return check_labels(np.stack(labels))
        if len({label.ndim for label in labels}) > 1 or any(label.dtype.kind not in "iu" for label in labels):
            raise InvalidData(
                f"labels have {len(shapes)} different shapes, such as {list(min(shapes))} and {list(max(shapes))}",
                "labels of different shapes must be class numbers with the same number of dimensions",
            )
        padded = np.full((count, *np.max([label.shape for label in labels], axis=0)), _PADDING, np.int64)
        for row, label in zip(padded, labels, strict=True):
            row[tuple(map(slice, label.shape))] = label
        return check_labels(padded)


def _digests_in_sequences(digests: Array, sequence: Array) -> Array:
    """Digests of samples that are equal only if the whole sequences are: equal calls of different sequences are not copies."""
    found = np.empty_like(digests)
    for first, last in itertools.pairwise([*np.flatnonzero(np.diff(sequence, prepend=-1)), len(sequence)]):
        whole = digests[first:last].tobytes()
        for number in range(first, last):
            own = hashlib.blake2b(whole + str(number - first).encode(), digest_size=DIGEST_BYTES).digest()
            found[number] = np.frombuffer(own, np.uint8)
    return found
