"""Samples in a CSV file: one line per sample, below a line with the names of the columns."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.dataset import LABELS
from penstock.errors import InvalidData
from penstock.tensor import DataType, Signature, TensorSpec

_TRUE, _FALSE = {"1", "true"}, {"0", "false"}


def csv_samples(path: Path, signature: Signature) -> Iterator[dict[str, Any]]:
    """The samples of a file. Either each input takes one value per sample, from the column of its name, or the model has one input,
    which takes the values of all columns except ``labels``, in order.

    Raises InvalidData if the columns do not suit the model, or a cell does not have the type of its input.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            columns = [name.strip() for name in next(reader, [])]
            parse = _parser(path, columns, signature)
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(columns):
                    raise InvalidData(
                        f"'{path}', line {reader.line_num} has {len(cells)} cells, but there are {len(columns)} columns",
                        "give every line a cell for each column",
                    )
                yield parse(cells, reader.line_num)
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidData(
                f"'{path}', line {reader.line_num} is not CSV: {error}", "save it as CSV in UTF-8"
            ) from None


def _parser(path: Path, columns: list[str], signature: Signature) -> Callable[[list[str], int], dict[str, Any]]:
    """A function that makes a sample of the cells of a line, which it is also given the number of."""
    specs, names = signature.inputs, signature.input_names
    places = {name: place for place, name in enumerate(columns)}
    if len(places) < len(columns):
        raise InvalidData(f"'{path}' has two columns of the same name: {columns}", "name every column differently")
    labels = places.get(LABELS) if LABELS not in names else None
    features = [place for place in places.values() if place != labels]

    def cell(spec: TensorSpec, cells: list[str], place: int, line: int) -> Any:
        try:
            return _value(spec.datatype, cells[place].strip())
        except ValueError:
            raise InvalidData(
                f"'{path}', line {line}: column '{columns[place]}' has '{cells[place][:40]}', but input '{spec.name}' is "
                f"{spec.datatype.value}",
                "repair the cell, or remove the line",
            ) from None

    def sample(cells: list[str], line: int) -> dict[str, Any]:
        if set(names) <= places.keys():
            found = {spec.name: _shaped(spec, cell(spec, cells, places[spec.name], line)) for spec in specs}
        else:
            found = {names[0]: [cell(specs[0], cells, place, line) for place in features]}
        return found if labels is None else found | {LABELS: _label(cells[labels].strip())}

    wanted = specs[0].shape[-1] if len(specs) == 1 and specs[0].shape else 0
    if not set(names) <= places.keys() and (not features or wanted not in (-1, len(features))):
        raise InvalidData(
            f"'{path}' has the columns {columns}, but the model has the inputs {names}",
            f"name a column after each input, or give {wanted} columns of features besides '{LABELS}'"
            if wanted > 0
            else "name a column after each input",
        )
    return sample


def _shaped(spec: TensorSpec, value: Any) -> Any:
    """``value`` as the only element of a row or call of the input."""
    for _ in spec.shape[1:]:
        value = [value]
    return value


def _value(datatype: DataType, text: str) -> Any:
    """The value of a cell. Raises ValueError."""
    if datatype is DataType.BYTES:
        return text
    if datatype is DataType.BOOL:
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError
        return text.lower() in _TRUE
    return float(text) if datatype.is_float else int(text)


def _label(text: str) -> Any:
    """A label as a number if it is one, otherwise as text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
