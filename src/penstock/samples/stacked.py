"""Samples that are stacked in one array per input, as in an npz file of rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.dataset import LABELS, Dataset, Stacked
from penstock.errors import InvalidData
from penstock.samples.hints import InputHints
from penstock.samples.values import check_finite, check_labels, typed
from penstock.tensor import Array, Signature, TensorSpec


def check_dataset(
    arrays: Mapping[str, Array], signature: Signature, *, independent: bool = False, hints: InputHints | None = None
) -> Dataset:
    """Make a dataset from the arrays for the inputs of ``signature`` and the array ``labels``, if present. Raises InvalidData.

    If the model has a batch axis, the arrays have the model's rank, and their first axis counts rows. Otherwise, they have one more
    axis, the first, which counts calls; an array of the model's rank is used in every call. Arrays with the model's rank alone are one
    call. ``independent`` is true if the rows of a call are known to be independent. ``hints`` tell which inputs take missing values.
    """
    labels = arrays.get(LABELS) if LABELS not in signature.input_names else None
    check_names(arrays, signature)
    given = {spec.name: np.asarray(arrays[spec.name]) for spec in signature.inputs}
    is_called = {spec.name: given[spec.name].ndim == len(spec.shape) + 1 for spec in signature.inputs}
    if signature.has_rows and not all(is_called.values()):
        inputs = {spec.name: _rows(spec, given[spec.name], signature.smallest_batch) for spec in signature.inputs}
        _check_values(inputs, signature, hints)
        return _dataset(inputs, labels, joins=True)
    inputs = {spec.name: _calls(spec, given[spec.name], is_called[spec.name]) for spec in signature.inputs}
    _check_values(inputs, signature, hints)
    calls = max((len(array) for name, array in inputs.items() if is_called[name]), default=1)
    inputs = {
        name: array if is_called[name] else np.broadcast_to(array, (calls, *array.shape[1:]))
        for name, array in inputs.items()
    }
    if signature.has_rows:
        rows = {array.shape[1] for array in inputs.values()}
        if rows == {1} or (len(rows) == 1 and (independent or rows == {signature.smallest_batch})):
            inputs = {name: array.reshape(-1, *array.shape[2:]) for name, array in inputs.items()}
            return _dataset(inputs, labels, joins=True)
    return _dataset(inputs, labels, joins=False)


def check_names(arrays: Mapping[str, object], signature: Signature) -> None:
    """Raise InvalidData if an input has no array, or if the name of the labels is misspelt, so that they would not be used."""
    missing = [name for name in signature.input_names if name not in arrays]
    if missing:
        raise InvalidData(
            f"no array for input(s) {missing}; the data have {sorted(arrays)}",
            "name the arrays after the model's inputs",
        )
    unused = arrays.keys() - signature.input_names
    misspelt = sorted(name for name in unused if name.strip(" _").lower().removesuffix("s") == "label")
    if misspelt and LABELS not in arrays:
        raise InvalidData(
            f"'{misspelt[0]}' is not an input of the model, and labels must be named '{LABELS}'",
            f"rename it to '{LABELS}', or remove it",
        )


def _dataset(inputs: dict[str, Array], labels: Array | None, *, joins: bool) -> Dataset:
    counts = {name: len(array) for name, array in inputs.items()}
    if labels is not None:
        labels = check_labels(np.asarray(labels))
        counts[LABELS] = len(labels)
    if len(set(counts.values())) > 1:
        raise InvalidData(f"arrays differ in number of samples: {counts}", "give every array one row per sample")
    return Dataset(Stacked(inputs), labels, joins=joins)


def _rows(spec: TensorSpec, array: Array, smallest: int) -> Array:
    """The array of an input whose first axis counts rows. ``smallest`` is the model's fixed batch size, or 1."""
    array = typed(spec, array)
    if array.ndim != len(spec.shape):
        raise InvalidData(
            f"input '{spec.name}' has {len(spec.shape)} dimension(s) {list(spec.shape)}, but the data has shape {list(array.shape)}",
            "the first axis counts samples",
        )
    _check_sizes(spec, array.shape[1:], spec.shape[1:], array.shape)
    _check_some(spec, array)
    if len(array) % smallest:
        raise InvalidData(
            f"the model takes exactly {smallest} samples at a time, but the data has {len(array)}",
            f"give a multiple of {smallest}",
        )
    return array


def _calls(spec: TensorSpec, array: Array, is_called: bool) -> Array:
    """The array of an input with one more axis, the first, which counts calls. If not ``is_called``, the array is for one call."""
    array = typed(spec, array)
    if array.ndim != len(spec.shape) + is_called:
        raise InvalidData(
            f"input '{spec.name}' has {len(spec.shape)} dimension(s) {list(spec.shape)}, but the data has shape {list(array.shape)}",
            "the model has no axis for samples, so give its inputs one more axis, the first, which counts calls",
        )
    array = array if is_called else array[np.newaxis]
    _check_sizes(spec, array.shape[1:], spec.shape, array.shape if is_called else array.shape[1:])
    _check_some(spec, array)
    return array


def _check_values(inputs: Mapping[str, Array], signature: Signature, hints: InputHints | None) -> None:
    for spec in signature.inputs:
        check_finite(spec, inputs[spec.name], hints)


def _check_sizes(spec: TensorSpec, shape: tuple[int, ...], wanted: tuple[int, ...], shown: tuple[int, ...]) -> None:
    if any(want not in (-1, got) for want, got in zip(wanted, shape, strict=True)):
        raise InvalidData(
            f"input '{spec.name}' has shape {list(spec.shape)}, but the data has shape {list(shown)}",
            "the first axis counts samples; the other axes must match the model's",
        )


def _check_some(spec: TensorSpec, array: Array) -> None:
    if len(array) == 0:
        raise InvalidData(f"input '{spec.name}' has no samples", "give at least one sample, preferably several hundred")
