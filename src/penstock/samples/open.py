"""Opens data of any kind as a dataset::

    data.npz      rows (or calls) stacked in one array per input
    folder/       one npz or npy file per sample
    data.jsonl    one JSON object per line
    data.csv      one line per sample
    data.parquet  one row per sample
    module:function, or a Python iterable of mappings

Folders and large npz files are read when samples are needed. Other data are read once, into a temporary file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.artifact import local_path
from penstock.dataset import Dataset
from penstock.errors import InvalidData, NotFound, PenstockError
from penstock.samples.folder import read_folder
from penstock.samples.hints import InputHints
from penstock.samples.iterable import gather
from penstock.samples.json_lines import json_lines
from penstock.samples.npz import read_npz
from penstock.samples.sequences import calls_in_sequences, check_states, has_sequences
from penstock.samples.stacked import check_dataset, check_names
from penstock.samples.tables.csv_table import csv_samples
from penstock.samples.tables.parquet import parquet_samples
from penstock.samples.user_code import is_function, iterated, load_function
from penstock.samples.values import typed
from penstock.tensor import Array, Signature

Data = (
    str | os.PathLike[str] | Mapping[str, Array] | Iterable[Mapping[str, Any]] | Iterable[Sequence[Mapping[str, Any]]]
)
"""A file, a folder or ``module:function``; a mapping from input names to arrays of stacked samples; or an iterable of samples or of
sequences of them. Values named ``labels`` are the labels."""

_TABLES = {".csv": csv_samples, ".parquet": parquet_samples}


def open_data(
    data: Data | Dataset, signature: Signature, *, independent: bool = False, hints: InputHints | None = None
) -> Dataset:
    """The samples of ``data`` for a model with this signature. ``independent`` is true if the rows of a call are proven independent.

    With ``hints``, samples may come in sequences, without the states of the model.

    Raises NotFound, ResourceExhausted, and InvalidData if the data are damaged or do not fit the model.
    """
    if isinstance(data, Dataset):
        _check_fits(data, signature)
        return data
    if isinstance(data, Mapping):
        return _arrays(data, signature, "the data", independent, hints)
    if isinstance(data, str | os.PathLike):
        return load_dataset(data, signature, independent=independent, hints=hints)
    return gather(iterated(data), signature, "the data", independent=independent, hints=hints)


def load_dataset(
    path: str | os.PathLike[str], signature: Signature, *, independent: bool = False, hints: InputHints | None = None
) -> Dataset:
    """Read samples from a file, a folder, or the function ``module:function``. Raises the errors of ``open_data``."""
    name = os.fspath(path)
    if is_function(name):
        return _returned(name, signature, independent, hints)
    path = local_path(name)
    if path.is_dir():
        return read_folder(path, signature, independent=independent, hints=hints)
    if not path.exists():
        raise NotFound(f"no data file '{path}'", "check the path")
    if not path.is_file():  # opening a pipe would wait for a writer, and a device may have no end
        raise InvalidData(f"'{path}' is a pipe or a device, not a file", "save the samples to a file")
    if path.suffix in {".jsonl", ".ndjson"}:
        return gather(json_lines(path), signature, f"'{path}'", independent=independent, hints=hints)
    if path.suffix in _TABLES:
        samples = _TABLES[path.suffix](path, signature, hints.states if hints else ())
        return gather(samples, signature, f"'{path}'", independent=independent, hints=hints)
    arrays = read_npz(path)
    if has_sequences(arrays, signature, hints):
        return _arrays(arrays, signature, f"'{path}'", independent, hints)
    try:
        return _arrays(arrays, signature, "", independent, hints)
    except InvalidData as error:
        raise InvalidData(f"'{path}': {error.message}", error.hint) from None


def data_path(data: Data | Dataset | None) -> Path | None:
    """The file or folder of ``data``; None if the data are not in a file."""
    if not isinstance(data, str | os.PathLike) or is_function(os.fspath(data)):
        return None
    return Path(data)


def _check_fits(data: Dataset, signature: Signature) -> None:
    """Raise InvalidData if the first sample of ``data`` does not fit a model with this signature."""
    sample, at = data.sample(0), int(data.joins)
    check_names(sample, signature)
    for spec in signature.inputs:
        array = typed(spec, sample[spec.name])
        if array.ndim != len(spec.shape) or any(
            want not in (-1, got) for want, got in zip(spec.shape[at:], array.shape[at:], strict=True)
        ):
            raise InvalidData(
                f"input '{spec.name}' has shape {list(spec.shape)}, but a call with one sample has shape {list(array.shape)}",
                "give data that fit the model",
            )
    if data.joins and data.count % signature.smallest_batch:
        raise InvalidData(
            f"the model takes exactly {signature.smallest_batch} samples at a time, but the data has {data.count}",
            f"give a multiple of {signature.smallest_batch}",
        )


def _arrays(
    arrays: Mapping[str, Array], signature: Signature, what: str, independent: bool, hints: InputHints | None
) -> Dataset:
    """The samples of arrays whose first axis counts them."""
    if hints and has_sequences(arrays, signature, hints):
        return gather(calls_in_sequences(arrays, signature), signature, what, hints=hints)
    check_states(arrays, hints)
    return check_dataset(arrays, signature, independent=independent, hints=hints)


def _returned(name: str, signature: Signature, independent: bool, hints: InputHints | None) -> Dataset:
    """The samples that the function ``name`` returns. Raises InvalidArgument, InvalidData, ResourceExhausted."""
    function = load_function(name, "data")
    try:
        found = function()
    except (PenstockError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise SystemExit
        raise InvalidData(
            f"the function '{name}' failed: {type(error).__name__}: {error}", "repair the function"
        ) from error
    if isinstance(found, Mapping):
        return _arrays(found, signature, f"'{name}'", independent, hints)
    return gather(iterated(found), signature, f"'{name}'", independent=independent, hints=hints)
